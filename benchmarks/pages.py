"""The text between the markers of each name on a page, from the runs of a folder of results."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import learning_page, releases, speed_tables, study_page, tables
from benchmarks.results import Run, latest, newest_first
from benchmarks.speed_tables import NOT_YET
from benchmarks.studies import STUDIES
from benchmarks.study import Section, Study

Table = Callable[[list[Run]], str]


def of(study: Study, text: Callable[[Section, Run], str]) -> Table:
    """A text about a study, from the newest run that has its section."""

    def table(runs: list[Run]) -> str:
        run = latest(study.section, runs)
        words = study.section.replace("_", " ").capitalize()
        if run is None:
            return f"{words}: {NOT_YET} (`python -m benchmarks.{study.program}`)."
        return text(run.sections[study.section], run)

    return table


def training_step(runs: list[Run]) -> str:
    """From the newest run of the trainers, and the newest that knows the heads' shares."""
    steps, shares = latest("trl_steps", runs), latest("end_to_end", runs)
    if steps is None or shares is None:
        return f"Time of a training step: {NOT_YET} (`{speed_tables.COMMANDS['cpu']}`)."
    return tables.training_step(steps, shares)


def learning_sentence(runs: list[Run]) -> str:
    """The accuracy over seeds, and the time of a step of a pretrained model if that was measured."""
    words = of(STUDIES["learning"], learning_page.sentence)(runs)
    if latest("pretrained", runs) is None:
        return words
    return f"{words} {of(STUDIES['pretrained'], study_page.step_sentence)(runs)}"


def integration_steps(runs: list[Run]) -> str:
    """Each project from the newest run that has it."""
    found = {project: latest(f"integration_steps.{project}", runs) for project in tables.STEP_ROWS}
    return tables.integration_steps({project: run for project, run in found.items() if run is not None})


def of_releases(table: Callable[..., str]) -> Table:
    """From all runs: a release may have been tested alone."""
    return lambda runs: table(*newest_first("cpu", "releases", runs))


TABLES: dict[str, Table] = {
    **{study.section.replace("_", "-"): of(study, study.table) for study in STUDIES.values() if study.table},
    "summary": speed_tables.summary,
    "training-step": training_step,
    "integration-steps": integration_steps,
    "cpu-speed": lambda runs: speed_tables.speed_of("cpu", runs),
    "cpu-sparsity": lambda runs: speed_tables.sparsity("cpu", runs),
    "gpu-speed": lambda runs: speed_tables.speed_of("cuda", runs),
    "gpu-sparsity": lambda runs: speed_tables.sparsity("cuda", runs),
    "providers": speed_tables.providers,
    "releases": of_releases(releases.table),
    "all-releases": of_releases(releases.all_packages),
    "learning-sentence": learning_sentence,
}
"""Name of a pair of markers, that of a section if nothing else is said, to the text between them."""
