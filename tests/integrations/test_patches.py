"""Attributes of other packages are replaced and come back."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from grpo_fused.heads.patches import Patches, everywhere, turn


def module(name: str, **functions: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(functions)
    return made


def test_what_an_instance_hides_comes_back():
    class Linear(torch.nn.Linear):
        pass

    layer, hooked = Linear(2, 2), Linear(2, 2)
    hooked.forward = before = lambda x: -x
    with Patches(*((x, "forward", lambda x: 2 * x) for x in (layer, hooked))) as patches:
        assert patches.names == ["Linear.forward"] * 2
        assert layer(3) == hooked(3) == 6
    assert "forward" not in vars(layer)
    assert hooked.forward is before
    with pytest.raises(ZeroDivisionError), Patches((layer, "forward", lambda x: 1 / x)):
        layer(0)
    assert "forward" not in vars(layer)


def test_all_modules_of_a_package_that_import_a_function(monkeypatch):
    modules = [module("toy", f=len), module("toy.sub", f=len), module("toy.other", f=max), module("toyish", f=len)]
    for toy in modules:
        monkeypatch.setitem(sys.modules, toy.__name__, toy)
    monkeypatch.setitem(sys.modules, "toy.forbidden", None)
    patches = Patches(*everywhere(modules[1], "f", sum))
    assert [m.f for m in modules] == [sum, sum, max, len]
    assert sorted(patches.names) == ["toy.f", "toy.sub.f"]
    patches.undo()
    patches.undo()
    assert [m.f for m in modules] == [len, len, max, len]
    assert patches.names == []


@pytest.mark.parametrize("other", [3, int], ids=["no-attributes", "cannot-be-set"])
def test_all_or_none_are_replaced(other):
    owner = module("toy", f=len)
    with pytest.raises(TypeError):
        Patches((owner, "f", sum), (other, "g", sum))
    assert owner.f is len


def test_an_interrupt_puts_back_what_was_replaced():
    class Interrupted(ModuleType):
        def __setattr__(self, name, value):
            raise KeyboardInterrupt

    owner = module("toy", f=len)
    with pytest.raises(KeyboardInterrupt):
        Patches((owner, "f", sum), (Interrupted("other"), "f", sum))
    assert owner.f is len


def test_replaced_twice():
    owner = module("toy", f=len)
    patches = Patches((owner, "f", sum), (owner, "f", min))
    assert owner.f is min
    patches.undo()
    assert owner.f is len


def test_a_thread_may_have_its_turn_twice():
    layer = torch.nn.Linear(2, 2)
    with turn(layer):
        assert turn(layer).acquire(blocking=False)
        turn(layer).release()


def test_a_property_is_set_back():
    """`training` of a module that torch.compile has wrapped: it forwards to the module inside."""
    layer = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    with Patches((layer, "training", False)):
        assert not layer.training
    assert layer.training
    assert layer._orig_mod.training
