"""Attributes of other packages' modules, classes and objects: replaced, and put back."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_ABSENT = object()
Replacement = tuple[Any, str, Any]
"""An attribute's owner (a module of a package, a class, an instance), its name and its new value."""


def everywhere(module: ModuleType, name: str, value: Any) -> list[Replacement]:
    """A function or class of a module, also in the modules of its package that have imported it so far."""
    original, package = getattr(module, name), module.__name__.split(".")[0] + "."
    # thousands, and FusedGRPOTrainer does it for each batch
    modules = [loaded for key, loaded in list(sys.modules.items()) if f"{key}.".startswith(package)]
    # None: a program forbids the import
    return [(loaded, name, value) for loaded in modules if loaded is not None and vars(loaded).get(name) is original]


_turns: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_turns_lock = threading.Lock()


def turn(module: nn.Module) -> threading.RLock:
    """Held while the module's `forward` is replaced: threads that share the module take turns."""
    with _turns_lock:
        return _turns.setdefault(module, threading.RLock())


class Patches:
    """Replaced attributes, until `undo` or for a block.

        with Patches((module, "forward", forward)):
            model(input_ids)

    Args:
        replacements: All of them are made, or none. An instance's attribute hides that of its class.
    """

    def __init__(self, *replacements: Replacement) -> None:
        self._originals: list[Replacement] = []
        try:
            for owner, name, value in replacements:
                self.replace(owner, name, value)
        except BaseException:
            self.undo()  # all of it or nothing
            raise

    @property
    def names(self) -> list[str]:
        """What is replaced, such as "trl.trainer.utils.add_fused_lm_head"."""
        return [f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for owner, name, _ in self._originals]

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """One more."""
        original = vars(owner).get(name, _ABSENT)
        if original is _ABSENT and isinstance(getattr(type(owner), name, None), property):
            original = getattr(owner, name)  # of a compiled module `training` is one; it can be set, not deleted
        setattr(owner, name, value)
        self._originals.append((owner, name, original))  # after it, which may be refused

    def undo(self) -> None:
        """Put back what stood there before, the latest first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()
