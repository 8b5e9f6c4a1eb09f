"""The text between the markers of each name on a page, from the runs of a folder of results."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import learning_page, releases, speed_tables, study_page, tables
from benchmarks.results import Run, latest
from benchmarks.studies import STUDIES
from benchmarks.study import Section, Study
from benchmarks.tables import NOT_YET

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


def learning_sentence(runs: list[Run]) -> str:
    """The accuracy over seeds, and the time of a step of a pretrained model if that was measured."""
    words = of(STUDIES["learning"], learning_page.sentence)(runs)
    if latest("pretrained", runs) is None:
        return words
    return f"{words} {of(STUDIES['pretrained'], study_page.step_sentence)(runs)}"


TABLES: dict[str, Table] = {
    **{study.section.replace("_", "-"): of(study, study.table) for study in STUDIES.values() if study.table},
    "summary": speed_tables.summary,
    "training-step": tables.training_step,
    "integration-steps": tables.integration_steps,
    "cpu-speed": lambda runs: speed_tables.speed_of("cpu", runs),
    "cpu-sparsity": lambda runs: speed_tables.sparsity("cpu", runs),
    "gpu-speed": lambda runs: speed_tables.speed_of("cuda", runs),
    "gpu-sparsity": lambda runs: speed_tables.sparsity("cuda", runs),
    "providers": speed_tables.providers,
    "releases": releases.table,
    "all-releases": releases.all_packages,
    "learning-sentence": learning_sentence,
}
"""Name of a pair of markers, that of a section if nothing else is said, to the text between them."""
