"""Why another process failed: a reason for those that only see that a connection is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from grpo_fused.ranks.parallel import PeerError, reason_of

_KEY = "grpo_fused/failure/"
_LATE = ("Timed out", "Application timeout")
_LOST = ("Connection closed", "Connection reset", "Broken pipe", *_LATE)  # of gloo, which raises RuntimeError


@contextmanager
def share_failures() -> Iterator[None]:
    """If a process raises in the block, the others raise a `PeerError` with its rank and its reason.

    For everything around a loss with `process_group` (which shares its own errors): rewards, the model, the optimizer.
    A process that raises leaves its reason in the store of the default process group, and ends. The others wait for it
    in a collective, which then fails: instead of the error of the connection they raise its reason. Without a reason
    (the process was killed, or hangs until the timeout of the group) the error says so. `GRPOTrainer` has this block
    around its construction and its training.

    All processes enter it. It is also a decorator: `@share_failures()`. Without a process group it does nothing.

    Raises:
        PeerError: Another process failed; a RuntimeError.
    """
    if (store := _store()) is not None:
        with suppress(RuntimeError):  # a store that has ended is found later
            store.delete_key(f"{_KEY}{dist.get_rank()}")  # of an earlier block, which this process survived
    try:
        yield
    except PeerError:
        raise
    except BaseException as failure:
        if (store := _store()) is None:  # the block may have made the group
            raise
        if (lost := _lost(failure)) is None:
            with suppress(RuntimeError):  # the store was in a process that has ended
                store.set(f"{_KEY}{dist.get_rank()}", str(reason_of(failure)))
            raise
        raise _explained(store, lost) from failure


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store  # type: ignore[attr-defined]

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return _get_default_store() if several else None


def _lost(failure: BaseException | None) -> BaseException | None:
    """The failure, or what caused it, if that is a collective whose other process ended or did not answer."""
    while failure is not None:
        text = str(failure)
        is_gloo = type(failure) is RuntimeError and ("gloo" in text or text.startswith("Application timeout"))
        is_lost = is_gloo and any(sign in text for sign in _LOST)
        if is_lost or isinstance(failure, (dist.DistBackendError, dist.DistNetworkError)):
            break
        failure = failure.__cause__
    return failure


def _explained(store: Any, lost: BaseException) -> PeerError:
    try:
        keys = {rank: f"{_KEY}{rank}" for rank in range(dist.get_world_size())}
        reasons = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
    except RuntimeError:
        return PeerError("the process that holds the store of the process group has ended; its output has the reason")
    if reasons:
        return PeerError.of(reasons)
    if any(sign in str(lost) for sign in _LATE):
        return PeerError("another process of the group did not answer in time")
    return PeerError("another process of the group ended without an error: it was killed, or has left")
