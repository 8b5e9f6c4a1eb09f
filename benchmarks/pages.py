"""Which tables each page shows: the names of its markers, and the text between them, from a folder of results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import cost, learning_page, releases, speed_tables, study_page, tables
from benchmarks.results import Run, latest, newest_first
from benchmarks.speed_tables import NOT_YET
from benchmarks.studies import STUDIES

Table = Callable[[Path], str]


def of(program: str, text: Callable[[Run], str] | None = None) -> Table:
    """A study's table, or another text, from the newest run that has its section."""
    study = STUDIES[program]
    text = text or study.table
    assert text is not None

    def table(folder: Path) -> str:
        run = latest(study.section, folder)
        words = study.section.replace("_", " ").capitalize()
        return text(run) if run is not None else f"{words}: {NOT_YET} (`python -m benchmarks.{program}`)."

    return table


def training_step(folder: Path) -> str:
    """From the newest run of the trainers, and the newest that knows the heads' shares."""
    steps, shares = latest("trl_steps", folder), latest("end_to_end", folder)
    if steps is None or shares is None:
        return f"Time of a training step: {NOT_YET} (`{speed_tables.COMMANDS['cpu']}`)."
    return tables.training_step(steps, shares)


def learning_sentence(folder: Path) -> str:
    """The accuracy over seeds, and the time of a step of a pretrained model if that was measured."""
    trained = latest("pretrained", folder)
    words = of("learning", learning_page.sentence)(folder)
    return words if trained is None else f"{words} {study_page.step_sentence(trained)}"


def integration_steps(folder: Path) -> str:
    """Each project from the newest run that has it."""
    runs = {project: latest(f"integration_steps.{project}", folder) for project in tables.STEP_ROWS}
    return tables.integration_steps({project: run for project, run in runs.items() if run is not None})


def of_releases(table: Callable[..., str]) -> Table:
    """From all runs: a release may have been tested alone."""
    return lambda folder: table(*newest_first("cpu", "releases", folder))


TABLES: dict[str, Table] = {
    "summary": speed_tables.summary,
    "training-step": training_step,
    "integration-steps": integration_steps,
    "cpu-speed": lambda folder: speed_tables.speed_of("cpu", folder),
    "limit": of("limit"),
    "cpu-sparsity": lambda folder: speed_tables.sparsity("cpu", folder),
    "gpu-speed": lambda folder: speed_tables.speed_of("cuda", folder),
    "gpu-sparsity": lambda folder: speed_tables.sparsity("cuda", folder),
    "graphs": of("graphs"),
    "gpu-modelled": lambda folder: cost.modelled(),
    "providers": speed_tables.providers,
    "accuracy": of("accuracy"),
    "growth": of("growth"),
    "threads": of("threads"),
    "end-to-end": of("end_to_end"),
    "candidates": of("candidates"),
    "alternatives": of("alternatives"),
    "heads": of("heads"),
    "compiled": of("aot"),
    "ptx": of("ptx_profile"),
    "divergence": of("divergence"),
    "generation": of("generation"),
    "shared-prompts": of("shared_prompts"),
    "pretrained": of("pretrained"),
    "pretrained-cut": of("pretrained_cut"),
    "pretrained-lora": of("pretrained_lora"),
    "study-distribution": of("real_rollouts"),
    "mismatch": of("mismatch"),
    "masks": of("masks"),
    "published": of("published"),
    "releases": of_releases(releases.table),
    "all-releases": of_releases(releases.all_packages),
    "learning-sentence": learning_sentence,
    "learning": of("learning"),
    "learning-countdown": of("learning_countdown"),
    "learning-options": of("learning_options"),
    "length-bias": of("length_bias"),
    "centering": of("centering"),
    "centering-tail": of("centering_tail"),
}
"""Name of a pair of markers to the text between them."""

_PAGES = {
    "README.md": ("summary", "training-step", "learning-sentence"),
    "docs/integrations.md": ("training-step", "integration-steps", "all-releases"),
    "docs/training_step.md": ("generation", "shared-prompts"),
    "docs/vllm.md": ("masks", "mismatch"),
    "docs/published.md": ("published",),
    "docs/divergence.md": ("divergence",),
    "docs/versions.md": ("releases",),
    "docs/alternatives.md": ("centering-tail", "alternatives"),
    "docs/heads.md": ("heads",),
    "docs/study.md": (
        "learning-sentence", "learning", "learning-countdown", "learning-options", "length-bias", "centering",
        "pretrained", "pretrained-cut", "pretrained-lora", "study-distribution",
    ),
}  # fmt: skip
_ELSEWHERE = {name for names in _PAGES.values() for name in names}
PAGES = _PAGES | {"docs/benchmarks.md": tuple(name for name in TABLES if name not in _ELSEWHERE)}
"""Page to the names of its tables."""
