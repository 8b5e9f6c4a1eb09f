"""The tables of sampling masks, and of what others published about truncated sampling and heads in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.results import Run, where
from benchmarks.study import Section
from benchmarks.tables import grid, paragraphs

TRL_7269 = {
    "top_p 0.8, top_k 1024": (0.895, 0.896, 0.895, 0.518, 1.001, 0.043),
    "top_k 20": (0.965, 0.965, 0.995, 0.162, 1.000, 0.062),
    "top_k 1024": (0.994, 0.995, 1.000, 0.069, 1.000, 0.059),
}
"""Kept mass; mean and median ratio and share outside [0.9, 1.1] without the masks; mean and share with them."""


def masks(section: Section, run: Run) -> str:
    """Sizes of the sets, whether they are the masks, and the host's memory and time."""

    def cells(name: str, row: dict[str, Any]) -> Iterator[str]:
        masks, logprobs = row["masks"], row.get("log-probs", {"refused": ""})
        sizes, held = masks["size"], row["tokens"] - masks["differs"]["positions"]
        yield name
        yield f"{sizes['mean']:,.0f}, {sizes['median']:,.0f}, {sizes['max']:,.0f}"
        yield f"{held} of {row['tokens']}"
        yield f"{masks['vllm_bytes'] / 1024:,.1f}"
        yield f"{masks['set_bytes'] / 1024:,.2f}"
        if "refused" in logprobs:
            yield from ("refused", "")
            return
        yield f"{logprobs['vllm_bytes'] / 1024:,.1f}"
        theirs, ours = (x["vllm_us"] + x["ours_us"] for x in (logprobs, masks))
        yield f"{theirs / ours:.3g}"

    header = (
        "| model, sampling | tokens of a set: mean, median, largest | masks that are the set of the logits "
        "| KiB of a token's mask | our set | log-probs | their host time / that of masks |"
    )
    rows = (tuple(cells(name, row)) for name, row in section["cases"].items() if "masks" in row)
    return paragraphs(grid(header, rows), f"V = {section['V']}; {where(run)}.")


def published(section: Section, run: Run) -> str:
    """Claim, source, their figures, ours."""

    def rows() -> Iterator[tuple[str, ...]]:
        trl = "TRL pull request 7269: Qwen2.5-1.5B-Instruct, vLLM 0.28"
        for name, (mass, mean, median, outside, with_masks, still) in TRL_7269.items():
            got = section["ratios"][name]
            whole, masks = got["whole"], got["masks"]
            yield (
                f"{name}: the mean ratio is the kept mass", trl,
                f"mass {mass:.3f}; ratio {mean:.3f}, median {median:.3f}, {outside:.1%} outside",
                f"mass {got['mass']:.3f}; ratio {whole['mean']:.3f}, median {whole['median']:.3f}, "
                f"{whole['outside']:.1%} outside",
            )  # fmt: skip
            yield (
                f"{name}: with the sets it is 1", trl, f"{with_masks:.3f}, {still:.1%} outside",
                f"{masks['mean']:.3f}, {masks['outside']:.1%} outside",
            )  # fmt: skip
        largest = max(got["from_closed_form"] for got in section["ratios"].values())
        yield (
            "the log-ratio of each token is log(kept mass)", "TRL issue 6789, a comment", "derived",
            f"within {largest:.1g} nats",
        )  # fmt: skip
        got = section["sizes"]
        yield (
            "top_p 0.97, top_k 512: sizes of the sets", "prime-rl pull request 2979: R1-Distill-Qwen-1.5B in training",
            "mean 8, median 2, p99 82, 45–48 % alone",
            f"mean {got['mean']:.0f}, median {got['median']:.0f}, p99 {got['p99']:.0f}, {got['alone']:.0%} alone",
        )  # fmt: skip
        got = section["correlation"]
        yield (
            "probabilities of rollout and trainer correlate more with an fp32 head", "MiniMax-M1, section 3.2",
            "0.9x → 0.99x", f"{got['bf16']['bf16 logits']:.4f} → {got['fp32']['whole']:.4f}",
        )  # fmt: skip

    counts = {row["tokens"] for row in (*section["ratios"].values(), section["sizes"])}
    return paragraphs(
        grid("| claim | source | theirs | ours |", rows()),
        f"`{section['command']}`; {section['model']}, {' to '.join(map(str, sorted(counts)))} tokens a row; "
        f"{where(run)}.",
    )
