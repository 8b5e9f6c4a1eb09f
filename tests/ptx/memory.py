"""Address spaces: ranges of bytes at given addresses, and nothing between them."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from .numbers import Array
from .text import PtxError

POISON_BYTE = 0xFF
"""Of memory that nobody wrote: NaN in bf16, fp16, fp32 and fp64."""

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Space:
    """Ranges of memory; an access outside of them, or one that is not aligned, raises `PtxError`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts: list[int] = []
        self.arrays: list[Array] = []

    def add(self, start: int, array: Array) -> None:
        """A range: the bytes (uint8) of `array` from address `start`, which is a multiple of 8."""
        assert array.dtype == np.uint8
        assert start % 8 == 0, f"{start:#x}"
        at = bisect_right(self.starts, start)
        self.starts.insert(at, start)
        self.arrays.insert(at, array)

    def poisoned(self, start: int, size: int) -> Space:
        """The space itself, with a further range that nobody wrote yet."""
        self.add(start, np.full(-(-size // 8) * 8, POISON_BYTE, np.uint8))
        return self

    def load(self, addresses: Array, size: int) -> Array:
        """Unsigned numbers of `size` bytes at the addresses (int64)."""
        parts = self._find(addresses, size)
        if len(parts) == 1:
            view, index, _ = parts[0]
            return view[index]
        result = np.empty(addresses.shape, UNSIGNED[size])
        for view, index, chosen in parts:
            result[chosen] = view[index]
        return result

    def store(self, addresses: Array, values: Array) -> None:
        """Write unsigned numbers; of several to one address the last remains."""
        for view, index, chosen in self._find(addresses, values.dtype.itemsize):
            view[index] = values if chosen is None else values[chosen]

    def check(self, addresses: Array, size: int) -> None:
        """Raise unless `size` bytes at each address are in one range, and aligned."""
        self._find(addresses, size, whole=True)

    def _find(self, addresses: Array, size: int, *, whole: bool = False) -> list[tuple[Array, Array, Array | None]]:
        if not addresses.size:
            return []
        if (addresses & (size - 1)).any():
            wrong = int(addresses[(addresses & (size - 1)) != 0][0])
            raise PtxError(f"address {wrong:#x} in {self.name} memory is not a multiple of {size}")
        low, high = int(addresses.min()), int(addresses.max())
        at = bisect_right(self.starts, low) - 1
        if at >= 0 and high + size <= self.starts[at] + self.arrays[at].size:
            return [] if whole else [self._view(at, addresses, size, None)]
        # not all in one range
        which = np.searchsorted(np.array(self.starts, np.int64), addresses, side="right") - 1
        found = []
        for at in np.unique(which):
            chosen = which == at
            end = self.starts[at] + self.arrays[at].size if at >= 0 else -1
            outside = chosen & (addresses + size > end)
            if outside.any():
                wrong, lane = int(addresses[outside][0]), int(np.flatnonzero(outside.ravel())[0])
                near = f"; the range before it ends at {end:#x}" if at >= 0 else ""
                raise PtxError(f"{size} bytes at {wrong:#x} (access {lane}) are outside of {self.name} memory{near}")
            if not whole:
                found.append(self._view(at, addresses[chosen], size, chosen))
        return found

    def _view(self, at: int, addresses: Array, size: int, chosen: Array | None) -> tuple[Array, Array, Array | None]:
        array = self.arrays[at]
        return array[: array.size // size * size].view(UNSIGNED[size]), (addresses - self.starts[at]) // size, chosen
