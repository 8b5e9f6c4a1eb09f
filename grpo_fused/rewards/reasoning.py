"""The reasoning-steps reward: does the completion go step by step?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_fused.rewards.text import Text, text_of

# "Step 1:", "1." and bullets at the start of a line, and the words that join steps. Digits are counted, not repeated
# without bound, so that no run of them is read more than four times.
_MARKER = re.compile(r"Step [0-9]{1,4}:|^(?:[0-9]{1,4}\.|[-*])|\b(?:First|Second|Next|Finally),", re.MULTILINE)
_ENOUGH = 3


def reasoning_steps_reward(completions: Sequence[Text], **columns: object) -> list[float]:
    """`min(1, markers / 3)`: "Step 1:", numbered or bulleted lines, "First,", "Second,", "Next,", "Finally,".

    Args:
        completions: N completions.
        **columns: prompts and the other columns of the data set, unused.

    Returns:
        N rewards from 0.0 to 1.0.

    Source: the reasoning steps reward of Open-R1.
    """
    return [min(1.0, len(_MARKER.findall(text_of(completion))) / _ENOUGH) for completion in completions]
