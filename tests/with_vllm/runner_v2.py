"""vLLM's model runner V2 on a CPU: its kernels are Triton's, which has no CPU backend here, and an interpreter.

`VLLM_USE_V2_MODEL_RUNNER=1` runs the tests of this folder so. On a GPU this runner is vLLM's default.
"""

from __future__ import annotations

import os
import types


def interpret() -> None:
    """Before vLLM is imported."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET=1 must be in the environment: Triton reads it when it is imported")
    from triton import backends

    # vLLM for CPUs asks whether there is a backend of this name, and whether its driver is active
    driver = types.SimpleNamespace(is_active=lambda: True)
    backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)  # type: ignore[assignment]
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # its own form in torch: the interpreter would take seconds for each step
