"""The linear forms that the fields of a config can mean for its head, the most likely one first.

A field is not reliable. `logits_scaling` divides in Granite, multiplies in HyperCLOVA X, and divides the hidden states
before the head in MiniCPM3; MPT's config has a `logit_scale` that its model never reads. So the fields give
candidates, and `check` compares them with the model.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import NamedTuple

from torch import nn

MEANINGS: dict[str, tuple[str, ...]] = {
    "final_logit_softcapping": ("caps",),  # Gemma 2 to 4, nanochat, MuseGlimmer
    "logits_soft_cap": ("caps",),  # recurrent_gemma
    "output_logit_soft_cap": ("caps",),  # xLSTM
    "logit_scale": ("multiplies",),  # Cohere
    "lm_head_multiplier": ("multiplies",),  # Falcon-H1
    "output_multiplier": ("multiplies",),  # MuseGlimmer
    "logits_scaling": ("divides", "multiplies"),  # Granite; HyperCLOVA X
    "unpadded_vocab_size": ("counts the logits",),  # Inkling: the weight's rows after it are padding
}
"""The effects that a field can have on the logits, the usual one first. A model may also ignore any field."""


class HeadForm(NamedTuple):
    """logits = softcap * tanh(logit_scale * (h W[:vocab_size]^T + b) / softcap)."""

    logit_scale: float
    softcap: float | None
    vocab_size: int
    """rows of the weight that make logits"""
    fields: tuple[str, ...] = ()
    """the config fields that it was read from, with their values"""

    def __str__(self) -> str:
        """The text of the form in an error."""
        source = ", ".join(self.fields) or "no field of the config"
        return f"logit_scale={self.logit_scale:g}, softcap={self.softcap}, vocab_size={self.vocab_size} ({source})"


class _Reading(NamedTuple):
    """A field of a config with one of its meanings; an empty meaning: the model ignores it."""

    name: str
    value: float
    meaning: str


def candidate_forms(model: nn.Module, weight_rows: int) -> list[HeadForm]:
    """The forms that the config of `model` can mean for a weight of `weight_rows` rows.

    The first has the usual meaning of every field; each further one deviates in more of them.
    """
    fields = list(_readings(configs(model)))
    usual = [readings[0] for readings in fields]
    forms: dict[tuple[float, float | None, int], HeadForm] = {}
    for choice in sorted(itertools.product(*fields), key=lambda choice: sum(map(operator.ne, choice, usual))):
        if [reading.meaning for reading in choice].count("caps") <= 1:  # no model caps twice
            form = _form(choice, weight_rows)
            forms.setdefault(form[:3], form)
    return list(forms.values())


def _form(readings: Sequence[_Reading], weight_rows: int) -> HeadForm:
    def values(meaning: str) -> list[float]:
        return [reading.value for reading in readings if reading.meaning == meaning]

    return HeadForm(
        logit_scale=math.prod(values("multiplies")) * math.prod(1.0 / value for value in values("divides")),
        softcap=next(iter(values("caps")), None),
        vocab_size=int(min([weight_rows, *values("counts the logits")])),
        fields=tuple(f"config.{name}={value:g} {meaning}" for name, value, meaning in readings if meaning),
    )


def configs(model: nn.Module) -> list[object]:
    """The text config of a nested one, then the outer one: models differ in which of them holds a field."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    get_text_config = getattr(config, "get_text_config", None)
    text = get_text_config() if callable(get_text_config) else config
    return [text] if text is config else [text, config]


def _readings(sources: Sequence[object]) -> Iterator[list[_Reading]]:
    """The ways to read each field that a config has."""
    for name, meanings in MEANINGS.items():
        value = _number(sources, name)
        if value is None or (value < 0 and meanings in (("caps",), ("counts the logits",))):
            continue
        types = [str(getattr(config, "model_type", "")) for config in sources]
        if name == "logits_scaling" and any(kind.startswith("hyperclovax") for kind in types):
            meanings = meanings[::-1]  # the usual one matters where the self-check is skipped
        yield [_Reading(name, value, meaning) for meaning in (*meanings, "")]


def _number(sources: Sequence[object], name: str) -> float | None:
    """A finite number other than 0, or None: MPT's `logit_scale` may be the name of a formula, Cohere's None."""
    for config in sources:
        value = getattr(config, name, None)
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and float(value) != 0.0:
            return float(value)
    return None
