"""verl's own output processor for Megatron-Core 0.18 on our head, with sequence parallelism over two processes."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("verl") is None:  # importing it needs ray, or a double of it
    pytest.skip("verl is not installed", allow_module_level=True)
pytest.importorskip("megatron.core.models.gpt.gpt_model")

from with_megatron.gpt import run
from with_verl.megatron_check import check


@pytest.mark.parametrize("tensor", [1, 2])
def test_log_probs_entropies_and_gradients(tensor):
    run(check, tensor)
