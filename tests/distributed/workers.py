"""Worker processes for several jobs: each runs jobs as a rank of a gloo group."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import queue
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver as server
from pathlib import Path
from typing import Any
from unittest.mock import patch

TIMEOUT = 60  # seconds for a job of all ranks; the first one waits for imports


PAIRS: dict[tuple[int, int], Any] = {}
"""In a process of four: groups of two. All ranks create them together, before some ranks create further groups."""


def forkserver() -> Any:
    """A server that imports the package and the trainer once, for all ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distributed.jobs", "distributed.faults"])
    # the server of Python 3.11 does not get the parent's sys.path, and ignores what it cannot import
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}):
        server.ensure_running()
    return context


class Workers:
    """`size` ranks on the CPU; a job runs on the first few of them."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        os.environ["OMP_NUM_THREADS"] = "1"
        context = forkserver()
        self.inboxes = [context.Queue() for _ in range(size)]
        self.outbox = context.Queue()
        self.processes = [
            context.Process(target=_serve, args=(rank, size, str(folder / "store"), self.inboxes[rank], self.outbox))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def run(self, job: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        """`job(rank, group, *args)` on `ranks` ranks: their results in order; the first error is raised."""
        ended = [rank for rank in range(ranks) if not self.processes[rank].is_alive()]
        if ended:
            raise RuntimeError(f"ranks {ended} ended in an earlier job")
        for rank in range(ranks):
            self.inboxes[rank].put((job, ranks, args))
        results: dict[int, tuple[str, Any]] = {}
        while len(results) < ranks:
            try:
                rank, state, value = self.outbox.get(timeout=TIMEOUT)
            except queue.Empty:
                self.stop()
                raise TimeoutError(f"ranks {sorted(set(range(ranks)) - results.keys())} did not answer") from None
            results[rank] = (state, value)
        for rank in range(ranks):
            if results[rank][0] == "error":
                raise RuntimeError(f"rank {rank}:\n{results[rank][1]}")
        return [results[rank][1] for rank in range(ranks)]

    def stop(self) -> None:
        """End the processes at once."""
        for inbox in self.inboxes:
            inbox.put(None)
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


def _serve(rank: int, size: int, store: str, inbox: Any, outbox: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
    if size == 4:
        PAIRS.update({pair: dist.new_group(list(pair)) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))})
    while (item := inbox.get()) is not None:
        job, ranks, args = item
        try:
            outbox.put((rank, "ok", job(rank, groups[ranks], *args)))
        except Exception:
            outbox.put((rank, "error", traceback.format_exc()))
    dist.destroy_process_group()
