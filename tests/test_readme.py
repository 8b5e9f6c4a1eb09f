"""The README's code runs, and its "equivalent to" is."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[1] / "README.md"


def test_code_blocks():
    use, equivalent = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(use, names)
    out = names["out"]
    assert names["lm_head_weight"].grad.norm() > 0
    # on-policy, the ratio is 1: the old log-probs are the policy's own
    names |= {"old_per_token_logps": out.per_token_logps, "epsilon": 0.2, "epsilon_high": 0.28, "temperature": 0.9}
    exec(equivalent, names)
    assert out.loss.abs() < 1e-6, "advantages of one group of equal lengths add up to 0"
    torch.testing.assert_close(names["loss"].detach(), out.loss.detach(), rtol=0, atol=1e-5)
    mine = names["hidden_states"].grad.clone()
    names["hidden_states"].grad = None
    names["loss"].backward()
    theirs = names["hidden_states"].grad
    assert mine.norm() > 0
    assert (mine - theirs).norm() < 0.02 * theirs.norm()
