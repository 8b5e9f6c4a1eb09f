"""`benchmarks.pretrained` with a vocabulary cut to the task: a run takes minutes, so that there are many seeds.

    python -m benchmarks.gemma ~/gemma-3-270m                                       # the model, once
    python -m benchmarks.pretrained_cut ~/gemma-3-270m --work runs/pretrained --out results.json

The supervised start is that of the whole model. `benchmarks.gemma_cut` then keeps the tokens of the task, and all runs
begin there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gemma_cut import cut
from benchmarks.pretrained import LENGTH, Model, Since, Work, all_texts, measure, started
from benchmarks.seeds import Seeds
from benchmarks.study import Section, main


def cut_model(model: Path, work: Path) -> Path:
    """The folder of the model after its supervised start, with a cut vocabulary; both are made if they do not exist."""
    begin, folder = started(model, work), work / "cut"
    if not (folder / "cut.json").exists():
        cut(begin, folder, all_texts(), LENGTH)
    return folder


def run(
    model: Model, work: Work = Path("runs/pretrained"), seeds: Seeds = 12, since: Since = None
) -> Iterator[Section]:
    """The section `pretrained_cut`."""
    folder = cut_model(model, work)
    about = {"cut": json.loads((folder / "cut.json").read_text())}
    yield from measure(folder, folder, seeds, since, {"task": "pretrained_cut"}, about)


if __name__ == "__main__":
    main("pretrained_cut")
