"""What a config says about its head: the linear forms that its fields can mean, the most likely one first.

A field is no proof. `logits_scaling` divides in Granite, multiplies in HyperCLOVA X, and in MiniCPM3 divides the hidden
states before the head; MPT's config has a `logit_scale` that its model never reads. So the fields are turned into
candidates, and `check` asks the model which of them it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import NamedTuple

from torch import nn

SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Gemma 2 to 4, nanochat, MuseGlimmer; recurrent_gemma; xLSTM."""

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Cohere; Falcon-H1; MuseGlimmer. The logits are multiplied by them."""

DIVISOR = "logits_scaling"
"""Granite divides by it."""

_DIVISOR_MULTIPLIES = ("hyperclovax",)
"""Model types in which it is a factor after all, which matters where the self-check is skipped."""

UNPADDED = "unpadded_vocab_size"
"""Inkling drops the logits beyond it: they belong to rows of the weight that only pad it."""


class HeadForm(NamedTuple):
    """logits = softcap * tanh(logit_scale * (h W[:vocab_size]^T + b) / softcap)."""

    logit_scale: float
    softcap: float | None
    vocab_size: int
    """rows of the weight that make logits"""
    fields: tuple[str, ...] = ()
    """the config fields that it was read from, with their values"""

    def __str__(self) -> str:
        """As it reads in an error."""
        source = ", ".join(self.fields) or "no field of the config"
        return f"logit_scale={self.logit_scale:g}, softcap={self.softcap}, vocab_size={self.vocab_size} ({source})"


class _Option(NamedTuple):
    """One meaning of one field."""

    scale: float
    softcap: float | None
    vocab_size: int | None
    text: str | None


_UNUSED = _Option(1.0, None, None, None)


def candidate_forms(model: nn.Module, weight_rows: int) -> list[HeadForm]:
    """The forms that the config of `model` can mean for a weight of `weight_rows` rows.

    The first takes every field at its usual meaning; each further one deviates in more of them.
    """
    options = list(_field_options(configs(model)))
    # by how many fields deviate from their usual meaning, and then in the order of the fields
    choices = sorted(itertools.product(*(range(len(o)) for o in options)), key=lambda c: sum(i > 0 for i in c))
    forms: dict[tuple[float, float | None, int], HeadForm] = {}
    for choice in choices:
        picked = [option[i] for option, i in zip(options, choice, strict=True)]
        caps = [p.softcap for p in picked if p.softcap is not None]
        if len(caps) > 1:  # no model caps twice
            continue
        rows = [p.vocab_size for p in picked if p.vocab_size is not None]
        form = HeadForm(
            logit_scale=math.prod(p.scale for p in picked),
            softcap=caps[0] if caps else None,
            vocab_size=min([*rows, weight_rows]),
            fields=tuple(p.text for p in picked if p.text is not None),
        )
        forms.setdefault(form[:3], form)
    return list(forms.values())


def configs(model: nn.Module) -> list[object]:
    """The text config of a nested one, then the outer one: which of them holds a field differs between models."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    get_text_config = getattr(config, "get_text_config", None)
    text = get_text_config() if callable(get_text_config) else config
    return [text] if text is config else [text, config]


def _field_options(sources: Sequence[object]) -> Iterator[list[_Option]]:
    for name in SOFTCAPS:
        value = _number(sources, name)
        if value is not None and value > 0:
            yield [_Option(1.0, value, None, f"config.{name}={value:g} caps"), _UNUSED]
    for name in FACTORS:
        value = _number(sources, name)
        if value is not None:
            yield [_Option(value, None, None, f"config.{name}={value:g} multiplies"), _UNUSED]
    value = _number(sources, DIVISOR)
    if value is not None:
        divides = _Option(1.0 / value, None, None, f"config.{DIVISOR}={value:g} divides")
        multiplies = _Option(value, None, None, f"config.{DIVISOR}={value:g} multiplies")
        model_types = [str(getattr(config, "model_type", "")) for config in sources]
        if any(model_type.startswith(_DIVISOR_MULTIPLIES) for model_type in model_types):
            yield [multiplies, divides, _UNUSED]
        else:
            yield [divides, multiplies, _UNUSED]
    value = _number(sources, UNPADDED)
    if value is not None and value >= 1:
        yield [_Option(1.0, None, int(value), f"config.{UNPADDED}={int(value)} keeps that many logits"), _UNUSED]


def _number(sources: Sequence[object], name: str) -> float | None:
    """A finite number other than 0, or None: MPT's `logit_scale` may be the name of a formula, Cohere's None."""
    for config in sources:
        value = getattr(config, name, None)
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and float(value) != 0.0:
            return float(value)
    return None
