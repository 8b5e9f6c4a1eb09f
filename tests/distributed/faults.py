"""Programs of two processes of which the second one fails, and what both of them report."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from distributed.jobs import of_vocabulary, rows_of, slices
from distributed.workers import forkserver
from helpers import make_case, make_config
from trainer import runs
from trainer.small_model import build_small_model

from examples.arithmetic.model import build_tokenizer
from grpo_fused import ParallelGroups, share_failures
from grpo_fused.trainer import GRPOTrainer, HuggingFaceEngine, Sampling
from grpo_fused.trainer.checkpoint import identity, naming

LIMIT = 120
"""seconds within which both processes must have ended; the first pair waits for imports"""


class Outcome(NamedTuple):
    """What a process reported."""

    said: str
    """its result, or its error; empty if it was killed"""
    seconds: float
    """from the fault until it reported"""


def run_pair(folder: Path, program: Callable[..., str], *arguments: Any) -> list[Outcome]:
    """`program(rank, folder, *arguments)` on two processes, started as by torchrun, whose store outlives them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        forkserver().Process(target=_start, args=(rank, store.port, folder, program, arguments)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(end - time.monotonic(), 0.0))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    fault = float((folder / "fault").read_text()) if (folder / "fault").exists() else 0.0
    outcomes = []
    for rank in range(2):
        path = folder / f"rank-{rank}.json"
        said, at = json.loads(path.read_text()) if path.exists() else ("", fault)
        outcomes.append(Outcome(said, at - fault))
    if late:
        raise TimeoutError(f"{len(late)} processes did not end in {LIMIT} s: {outcomes}")
    return outcomes


def _start(rank: int, port: int, folder: Path, program: Callable[..., str], arguments: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    torch.set_num_threads(1)
    said = "nothing"
    try:
        said = program(rank, folder, *arguments)
    except BaseException as failure:
        said = f"{type(failure).__name__}: {failure}"
        raise
    finally:
        report(rank, folder, said)


def report(rank: int, folder: Path, said: str) -> None:
    """What the process says, and when."""
    (folder / f"rank-{rank}.json").write_text(json.dumps([said, time.time()]))


def fail(folder: Path, how: str, seconds: float = 0.0) -> None:
    """The fault itself; its time is kept."""
    (folder / "fault").write_text(repr(time.time()))
    if how == "raises":
        raise ConnectionError("the judge is offline")
    if how == "memory":
        raise MemoryError("no room for the activations")
    if how == "judge":
        raise RuntimeError("the judge: Connection reset by peer")
    if how == "data":
        raise IndexError("there is no such row")
    if how == "leaves":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "hangs":
        time.sleep(seconds)  # others wait less


def losses(rank: int, folder: Path, layout: str, how: str, timeout: float = LIMIT) -> str:
    """Three losses over a group; between the second and the third one process fails."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    case = make_case(5).to(torch.float32)
    if layout == "vocab":
        mine, groups = of_vocabulary(case, slices([15, 14])[rank]), ParallelGroups(vocab=dist.group.WORLD)
    else:
        mine, groups = rows_of(case, slice(2 * rank, 2 * rank + 2)), ParallelGroups(tokens=dist.group.WORLD)
    with share_failures():
        for step in range(3):
            mine.run(make_config(), process_group=groups)
            if step == 1 and rank == 1:
                fail(folder, how, 2 * timeout)
    return "done"


def twice(rank: int, folder: Path) -> str:
    """A process survives an error in a first block, and is killed in the second one."""
    dist.init_process_group("gloo")
    with suppress(ValueError), share_failures():
        if rank == 1:
            raise ValueError("an error that is handled")
    dist.barrier()
    with share_failures():
        if rank == 1:
            fail(folder, "kill")
        dist.barrier()
    return "done"


def without_launcher(rank: int, folder: Path, port: int) -> str:
    """The store is in the process that fails."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    dist.barrier()
    with share_failures():
        if rank == 0:
            fail(folder, "raises")
        dist.barrier()
    return "done"


def training(rank: int, folder: Path, where: str, how: str, timeout: float = LIMIT) -> str:
    """A trainer of which one process fails in the third step."""
    options = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=timeout))
    made = runs.fsdp_accelerator if where == "rollout" else partial(Accelerator, cpu=True)
    accelerator = made(kwargs_handlers=[options])
    trainer = runs.make(folder / "run", accelerator=accelerator, eval_steps=3, evaluate=dict)

    def then_fails(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*positional: Any, **named: Any) -> Any:
            if rank == 1 and trainer.steps_done >= 2:
                fail(folder, how, 2 * timeout)
            return function(*positional, **named)

        return wrapped

    if where == "reward":
        trainer.reward_functions["count_ones"] = then_fails(trainer.reward_functions["count_ones"])
    elif where == "rollout":  # the other process waits for a shard of the weights
        trainer.sampler.engine.generate = then_fails(trainer.sampler.engine.generate)  # type: ignore[method-assign]
    elif where == "data":
        trainer.collect = then_fails(trainer.collect)  # type: ignore[method-assign]
    elif where == "update":
        trainer.policy.hidden_states = then_fails(trainer.policy.hidden_states)  # type: ignore[method-assign]
    elif where == "evaluation":
        trainer.evaluate_too = then_fails(lambda: {})
    trainer.train()
    return f"stopped by {trainer.stopped_by} after step {trainer.steps_done}"


def shared(rank: int, folder: Path, kind: str, loss_type: str) -> str:
    """No process fails: `runs.shared`, which ends its process itself."""

    def leave(accelerator: Accelerator) -> None:
        accelerator.wait_for_everyone()
        report(rank, folder, "done")
        os._exit(0)

    runs.leave = leave
    runs.shared(str(folder), kind, loss_type)
    return "returned"


def sampling_in_step(rank: int, folder: Path) -> str:
    """Forward passes of a rollout, where the prompts of one process alone are equal."""
    dist.init_process_group("gloo")
    model, passes = build_small_model(29), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    prompts = [[1, 2, 3], [1, 2, 3] if rank == 0 else [4, 5]]
    engine = HuggingFaceEngine(model, build_tokenizer(), synced=True)
    engine.generate(prompts, Sampling(num_generations=1, max_completion_length=4, greedy=True))
    return f"{len(passes)} passes"


def under_another_error(rank: int, folder: Path) -> str:
    """A lost connection of a group that the block made is what caused the error of the process that stays; that of the
    other one is no such loss, although it reads as one."""
    with share_failures(), naming("cannot resume") if rank == 0 else nullcontext():
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            fail(folder, "judge")
        dist.barrier()
    return "done"


def other_start(rank: int, folder: Path, what: str) -> str:
    """The processes have other weights, another reference, or another newest checkpoint."""
    accelerator = Accelerator(cpu=True)
    make = partial(runs.make, accelerator=accelerator)
    if what == "first alone":  # has weights
        accelerator.state.fsdp_plugin = SimpleNamespace(cpu_ram_efficient_loading=True)
        want = identity(runs.build_small_model(21), runs.build_tokenizer())
        runs.build_small_model = partial(build_small_model, seed=rank)  # type: ignore[assignment]
        return f"the identity of the first: {make(None).checkpointer.identity == want}"
    if what == "weights":
        runs.build_small_model = partial(build_small_model, seed=rank)  # type: ignore[assignment]
    elif what == "reference":
        runs.GRPOTrainer = partial(GRPOTrainer, reference_model=build_small_model(21, seed=rank))  # type: ignore[misc, assignment]
    elif what == "disk":
        make(folder / str(rank), steps=1).train()
    make(folder / str(rank), steps=2, resume=what == "disk")
    return "made"


def other_rows(rank: int, folder: Path, rows: slice) -> str:
    """One process has other rows than the other one when it makes its trainer."""
    if rank == 1:
        (folder / "fault").write_text(repr(time.time()))
        runs.ROWS = runs.ROWS[rows]
    runs.make(None, accelerator=Accelerator(cpu=True))
    return "made"
