"""Runs the Python blocks of the README and docs/, and writes their output into the pages.

    python tests/doc_runner.py --write    # put the blocks' current output into the pages

Blocks of a page share a namespace, in order. A comment before a block gives its requirements:

    <!-- needs: model, input_ids -->     names that `PREPARED` defines
    <!-- run: torchrun 2 -->             the block is a program for two ranks
    <!-- file: name -->                  the block is this file of the reader
    <!-- not run: reason -->             a fragment; listed by `test_blocks_that_are_not_run_have_a_reason`

A block of text right after one of Python is its output: tests/test_docs.py expects the same words, numbers within
rounding.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    """A fenced block."""

    page: str
    line: int
    """of its first line of code, from 1"""
    language: str
    code: str
    needs: list[str]
    ranks: int
    """0: run here"""
    not_run: str | None
    file: str | None
    output: str | None
    """of the block of text that follows"""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """All blocks of a page."""
    lines, found, i = (ROOT / page).read_text(encoding="utf-8").splitlines(), [], 0
    comments: list[str] = []
    after = None  # the previous block, if only blank lines follow it
    while i < len(lines):
        fence = re.fullmatch(r"```(\w*)", lines[i])
        if fence:
            end = lines.index("```", i + 1)
            code = "\n".join(lines[i + 1 : end]) + "\n"
            if fence[1] == "text" and after is not None:
                found[after] = found[after]._replace(output=code)
                after = None
            else:
                found.append(Block(page, i + 2, fence[1], code, *_instructions(comments), None))
                after = len(found) - 1 if fence[1] == "python" else None
            comments, i = [], end
        elif comment := re.fullmatch(r"<!-- (.*) -->", lines[i]):
            comments.append(comment[1])
        elif lines[i].strip():
            comments, after = [], None
        i += 1
    return found


def _instructions(comments: list[str]) -> tuple[list[str], int, str | None, str | None]:
    needs: list[str] = []
    ranks, not_run, file = 0, None, None
    for comment in comments:
        what, _, value = comment.partition(": ")
        if what == "needs":
            needs += value.split(", ")
        elif what == "run":
            ranks = int(value.removeprefix("torchrun "))
        elif what == "not run":
            not_run = value
        elif what == "file":
            file = value
        elif not re.match(r"(begin|end):", comment):  # of a generated table
            raise ValueError(f"unknown instruction: {comment}")
    return needs, ranks, not_run, file


class Small:
    """Small examples of a reader's objects: models, data, folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, name: str, names: dict[str, Any]) -> Any:
        """The value of `name`, which may depend on names that the page has defined."""
        return PREPARED[name](self, names)


def _model(small: Small, names: dict[str, Any]) -> Any:
    pytest.importorskip("transformers")
    from integrations.tiny import build

    return build("gemma2")


def _ids(small: Small, names: dict[str, Any]) -> Any:
    from integrations.tiny import token_ids

    return token_ids()


def _trl(what: str) -> Callable[[Small, dict[str, Any]], Any]:
    def make(small: Small, names: dict[str, Any]) -> Any:
        pytest.importorskip("trl")
        from integrations import trl_runs

        if what == "model_path":
            return str(trl_runs.save_small_model(small.folder / "model"))
        if what == "options":
            return {
                "output_dir": str(small.folder / "out"), "per_device_train_batch_size": 4, "num_generations": 4,
                "max_completion_length": 6, "max_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no",
                "disable_tqdm": True,
            }  # fmt: skip
        return {"dataset": trl_runs.dataset, "tokenizer": trl_runs.build_tokenizer}[what]()

    return make


def _trl_args(small: Small, names: dict[str, Any]) -> Any:
    pytest.importorskip("trl")
    from trl import GRPOConfig

    return GRPOConfig(**_trl("options")(small, names))


def _reward(small: Small, names: dict[str, Any]) -> Any:
    from integrations.trl_runs import reward

    return reward


def _tiny_policy(small: Small, names: dict[str, Any]) -> Any:
    pytest.importorskip("accelerate")
    from grpo_fused.trainer.tiny import tiny_model, tiny_tokenizer

    tokenizer, folder = tiny_tokenizer(), small.folder / "policy"
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


PREPARED: dict[str, Callable[[Small, dict[str, Any]], Any]] = {
    "model": _model,
    "input_ids": _ids,
    "attention_mask": lambda small, names: torch.ones_like(names["input_ids"]),
    "old_per_token_logps": lambda small, names: names["out"].per_token_logps,
    "epsilon": lambda small, names: 0.2,
    "epsilon_high": lambda small, names: 0.28,
    "reward": _reward,
    "path": _tiny_policy,
    "rows": lambda small, names: [{"prompt": f"{number} + 1 ="} for number in range(4)],
    "folder": lambda small, names: small.folder / "run",
    "args": _trl_args,
    **{name: _trl(name) for name in ("model_path", "options", "dataset", "tokenizer")},
}
SMALLER = {"README.md": ("V = 8, 128, 256, 32000", "V = 8, 128, 256, 2000")}
"""Sizes of a reader's problem, and those that run here: beside the call, the page computes all logits and their gradient."""


def run_page(page: str, folder: Path) -> Iterator[tuple[Block, str, dict[str, Any]]]:
    """Each block that runs, its output, and the page's names so far."""
    small, module = Small(folder), types.ModuleType("page")
    names = module.__dict__
    torch.manual_seed(0)
    AcceleratorState._reset_state(reset_partial_state=True)  # pages have other precisions
    for block in blocks(page):
        if block.language != "python" or block.not_run is not None:
            continue
        block = block._replace(code=block.code.replace(*SMALLER.get(page, ("", ""))))
        for name in block.needs:
            names[name] = small.prepare(name, names)
        if block.ranks:
            yield block, _torchrun(block, folder), names
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # blank lines before it, so that a traceback has the page's line numbers
            exec(compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec"), names)
        yield block, printed.getvalue(), names


def _torchrun(block: Block, folder: Path) -> str:
    program = folder / "block.py"
    program.write_text(block.code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(block.ranks)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(program)], cwd=ROOT, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, f"{block}\n{done.stderr[-3000:]}"
    return done.stdout


def write() -> None:
    """Put the blocks' current output into the pages."""
    import tempfile

    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            for block, printed, _ in run_page(page, Path(folder)):
                if block.output is not None:
                    text = (ROOT / page).read_text(encoding="utf-8")
                    before = f"{block.code}```\n\n```text\n"
                    assert before + block.output in text, block
                    text = text.replace(before + block.output, before + printed)
                    (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/doc_runner.py --write")
    write()
