"""The reward of rows that bring their own verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_fused.call.options import check_flag
from grpo_fused.rewards.text import Text, extract_answer, judge_each, text_of


def score_answer_reward(
    completions: Sequence[Text],
    score_answer: Sequence[Callable[[str], float | None] | None],
    *,
    tagged: bool = True,
    **columns: object,
) -> list[float | None]:
    """What the row's own verifier gives the completion's answer: `score_answer(answer)`.

    The answer is the text of the only `<answer>` block, stripped; without one the reward is 0.0. The verifier sees text
    of the policy: it must not evaluate it.

    Args:
        completions: N completions.
        score_answer: N functions of the answer; None: this sample is not judged. Rows of `task: reasoning_gym` have
            them.
        tagged: False: the whole completion is the answer, stripped; for prompts that ask for nothing else.
        **columns: prompts and the other columns of the data set, unused.

    Returns:
        N rewards, as the verifiers return them.

    Raises:
        TypeError: `tagged` is not a bool, or the column holds something that cannot be called.

    Source: `score_answer` of the data sets of reasoning-gym (arXiv 2505.24760).
    """
    check_flag(tagged, "tagged")

    def judge(completion: Text, verifier: Callable[[str], float | None]) -> float | None:
        if not callable(verifier):
            raise TypeError(f"the score_answer column must hold functions or None; got {type(verifier).__name__}")
        answer = extract_answer(completion) if tagged else text_of(completion).strip()
        return 0.0 if answer is None else verifier(answer)

    return judge_each(judge, completions, score_answer=score_answer)
