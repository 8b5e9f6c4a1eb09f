"""The answer that a text of mathematics states: in its tags, in a box, or after GSM8K's hashes."""

from __future__ import annotations

from grpo_fused.rewards.plain_numbers import plain_number
from grpo_fused.rewards.tags import extract_answer

_BOX = "\\boxed{"
_HASHES = "####"
_WRAPPERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))


def stated_answer(text: str) -> str | None:
    """What stands in the only `<answer>` block, else in the last `\\boxed{}`, else after the last `####`; or None.

    The first of the three that the text uses decides: a text with two answer blocks has no answer, whatever it boxes.
    A box or hashes inside the answer block are taken off, and so are the signs of LaTeX's math mode. A text that is
    nothing but a number is its own answer.
    """
    if "<answer>" in text or "</answer>" in text:
        inside = extract_answer(text)
        return None if inside is None else _unwrapped(inside)
    if _BOX in text or _HASHES in text:
        return _unwrapped(text)
    return text.strip() if plain_number(text) is not None else None


def reference_answer(column: str) -> str:
    """The answer that a data set gives: as `stated_answer` finds it, else the whole text."""
    answer = stated_answer(column)
    return _without_math_mode(column.strip()) if answer is None else answer


def _unwrapped(text: str) -> str | None:
    if _BOX in text:
        text = _last_box(text)
    elif _HASHES in text:
        text = text.rpartition(_HASHES)[2].strip().partition("\n")[0]
    return _without_math_mode(text.strip()) or None


def _last_box(text: str) -> str:
    """What stands between the braces of the last box; empty if they do not balance."""
    start = text.rindex(_BOX) + len(_BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return ""


def _without_math_mode(text: str) -> str:
    for opening, closing in _WRAPPERS:
        if len(text) >= len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            return text[len(opening) : -len(closing)].strip()
    return text
