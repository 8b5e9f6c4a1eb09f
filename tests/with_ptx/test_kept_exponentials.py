"""Exponentials that are kept for the gradient: about as exact as dlogits that are rounded once."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs TRITON_INTERPRET=0: see make emulate-nvidia", allow_module_level=True)
pytest.importorskip("triton")

from benchmarks import kept_exponentials as study
from grpo_fused.testing import frobenius_error


@pytest.mark.gate(keep=lambda shape: shape == study.SHAPES[-1])
@pytest.mark.parametrize("shape", study.SHAPES, ids=str)
def test_errors_of_gradients(shape):
    """dH within 1.5, dW within 2.3 times the error of dlogits that are rounded once; confident tokens keep their digits."""
    case = study.Case.of(*shape)
    want, once, found = study.exact(case), study.exact(case, rounded=True), study.ours(case)
    for name, most in (("dhidden", 1.5), ("dweight", 2.3)):
        mine, least = (frobenius_error(getattr(each, name), getattr(want, name)) for each in (found, once))
        assert mine < most * least, name
    torch.testing.assert_close(found.at_target, want.at_target, rtol=2**-7, atol=0)
