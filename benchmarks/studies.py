"""All studies: the section that each measures, its table, and its picture."""

from __future__ import annotations

from benchmarks import (
    alternatives,
    centering_page,
    centering_tail,
    graphs,
    heads,
    learning_page,
    limit,
    ptx_profile,
    releases,
    sampling_page,
    speed_tables,
    study_page,
    study_plots,
    tables,
)
from benchmarks.study import Study

_ALL = (
    Study("cpu", "loss", speed_tables.speed, new_file=True),
    Study("limit", "limit", limit.table, keeps_cases=True),
    Study("sweep", "loss", speed_tables.speed, new_file=True),
    Study("rows", "rows", tables.rows),
    Study("tune", "tune", tables.tune),
    Study("graphs", "graphs", graphs.table),
    Study("counters", "counters"),
    Study("accuracy", "accuracy", tables.accuracy, study_plots.accuracy_plot),
    Study("growth", "growth", tables.growth, study_plots.growth_plot),
    Study("end_to_end", "end_to_end", tables.end_to_end, study_plots.end_to_end_plot),
    Study("alternatives", "alternatives", alternatives.table),
    Study("candidates", "candidates", tables.candidates, study_plots.candidates_plot),
    Study("heads", "heads", heads.table),
    Study("distillation", "distillation", plot=study_plots.distillation_plot),
    Study("pretrained", "pretrained", study_page.trained),
    Study("pretrained_cut", "pretrained_cut", study_page.trained, learning_page.learning_plot),
    Study("pretrained_lora", "pretrained_lora", study_page.adapted),
    Study("real_rollouts", "real_rollouts", study_page.distribution),
    Study("trl_steps", "trl_steps"),
    Study("integration_steps", "integration_steps.{project}", lambda _, run: tables.integration_steps([run])),
    Study("threads", "threads", tables.threads),
    Study("divergence", "divergence", tables.divergence),
    Study("objective", "objective"),
    Study("shared_prompts", "shared_prompts", tables.shared_prompts),
    Study("generation", "generation", tables.generation),
    Study("mismatch", "mismatch", tables.mismatch, keeps_cases=True),
    Study("masks", "masks", sampling_page.masks),
    Study("published", "published", sampling_page.published),
    Study("aot", "compiled", tables.compiled),
    Study("ptx_profile", "ptx", ptx_profile.table),
    Study("releases", "releases", lambda _, run: releases.all_packages([run]), keeps_cases=True),
    Study("learning", "learning", learning_page.comparison, learning_page.learning_plot),
    Study("learning_countdown", "learning_countdown", learning_page.comparison, learning_page.learning_plot),
    Study("learning_options", "learning_options", learning_page.options, learning_page.options_plot),
    Study("length_bias", "length_bias", learning_page.length_bias, learning_page.length_plot),
    Study("centering", "centering", centering_page.table, centering_page.plot),
    Study("centering_tail", "centering_tail", centering_tail.table),
)
STUDIES = {study.program: study for study in _ALL}
"""Program to study, in the order in which they are drawn."""
