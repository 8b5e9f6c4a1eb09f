"""Machine code of Hopper kernels: whether products wait for each other, and what the row work of a tile takes."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from typing import NamedTuple

LABEL = re.compile(r"(\.L_\w+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?\s*([A-Z][^;]*);")
TARGET = re.compile(r"`\((\.L_\w+)\)")
PRODUCT, EXPONENTIAL, WAIT = "HGMMA", "MUFU.EX2", "gsb0"


class Block(NamedTuple):
    """Instructions without a branch between them."""

    code: list[str]
    next: list[int]
    """numbers of the blocks that may follow"""

    def count(self, what: str) -> int:
        """Instructions whose name starts with `what`."""
        return sum(text.startswith(what) for text in self.code)


def blocks_of(listing: str) -> list[Block]:
    """The basic blocks of a kernel, from the output of `nvdisasm -c`."""
    blocks, labels, jumps = [Block([], [])], {}, []
    for line in listing.splitlines():
        if label := LABEL.match(line):
            blocks[-1].next.append(len(blocks))
            labels[label[1]] = len(blocks)
            blocks.append(Block([], []))
        elif found := INSTRUCTION.search(line):
            guard, text = found.groups()
            blocks[-1].code.append(text)
            if text.startswith(("BRA", "EXIT", "RET")):
                target = TARGET.search(text)
                if target:
                    jumps.append((len(blocks) - 1, target[1]))
                sometimes = guard or len(text.partition("`")[0].split()) > 1  # BRA.U names its predicate
                blocks.append(Block([], []))
                if sometimes:
                    blocks[-2].next.append(len(blocks) - 1)
    for block, label in jumps:
        blocks[block].next.append(labels[label])
    return [block._replace(next=[i for i in block.next if i < len(blocks)]) for block in blocks]


def is_serialized(listing: str) -> bool:
    """Whether ptxas made the products of a k step wait for each other (its warnings C7510 to C7515)."""
    products = [[text for text in block.code if text.startswith(PRODUCT)] for block in blocks_of(listing)]
    return any(WAIT in text for found in products for text in found[:-1])


def tile_instructions(listing: str) -> Counter[str] | None:
    """Instructions of a thread for the row work of a tile, by name; None for kernels that do not loop over products.

    It is the difference of two shortest ways from a product to the next: through the exponentials of a tile, and
    without them. Rare branches, such as the mask of the last tile, are not on it.
    """
    blocks = blocks_of(listing)
    products = [i for i, block in enumerate(blocks) if block.count(PRODUCT)]
    work = [i for i, block in enumerate(blocks) if block.count(EXPONENTIAL) > 16]
    plain = _shortest(blocks, products, products)
    there, back = _shortest(blocks, products, work), _shortest(blocks, work, products)
    if not (plain and there and back):
        return None
    names = Counter(text.split()[0] for i in there + back for text in blocks[i].code)
    names.subtract(text.split()[0] for i in plain for text in blocks[i].code)
    return names


def _shortest(blocks: list[Block], starts: list[int], ends: list[int]) -> list[int]:
    """The blocks after one of `starts` up to one of `ends` with the fewest instructions; empty if there is no way."""
    queue = [(len(blocks[i].code), [i]) for start in starts for i in blocks[start].next]
    heapq.heapify(queue)
    seen = set()
    while queue:
        length, path = heapq.heappop(queue)
        if path[-1] in ends:
            return path
        if path[-1] not in seen:
            seen.add(path[-1])
            for i in blocks[path[-1]].next:
                heapq.heappush(queue, (length + len(blocks[i].code), [*path, i]))
    return []
