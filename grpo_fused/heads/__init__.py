"""The lm head of a Hugging Face causal LM: its weights, its form, its input, and a check that these are right.

`modules` finds the head and its weight (adapters included), `form` reads scale and softcap from the config, `check`
compares them with the model's own logits, and `hidden` gives the states that the head multiplies.
Nothing here imports transformers or peft: a module is judged by its methods and attributes.
"""

from grpo_fused.heads.check import LMHeadInputs, check_head, lm_head_inputs
from grpo_fused.heads.form import HeadForm
from grpo_fused.heads.hidden import CapturedHeadInput, capture_head_input, head_hidden_states

__all__ = [
    "CapturedHeadInput",
    "HeadForm",
    "LMHeadInputs",
    "capture_head_input",
    "check_head",
    "head_hidden_states",
    "lm_head_inputs",
]
