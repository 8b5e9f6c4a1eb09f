"""Package layout and the optional native extension.

`kernels/` is installed as `grpo_fused.kernels`. It has no `__init__.py`: a top-level package of that name would shadow
Hugging Face's `kernels` for everybody who runs from a checkout.
"""

from __future__ import annotations

import os

from setuptools import setup

MODES = ("auto", "none", "cpu", "cuda")


def native_extensions() -> list[object]:
    """Extensions to build, by `GRPO_FUSED_BUILD`: auto (what the machine allows), none, cpu or cuda (or fail)."""
    mode = os.environ.get("GRPO_FUSED_BUILD", "auto")
    if mode not in MODES:
        raise SystemExit(f"GRPO_FUSED_BUILD must be one of {', '.join(MODES)}; got {mode!r}")
    if mode in ("cpu", "cuda"):
        raise SystemExit(f"GRPO_FUSED_BUILD={mode}: this version has no native sources to build; use auto or none")
    return []


setup(
    packages=[
        "grpo_fused",
        "grpo_fused.engines",
        "grpo_fused.heads",
        "grpo_fused.kernels",
        "grpo_fused.rewards",
        "grpo_fused.trainer",
    ],
    package_dir={"grpo_fused.kernels": "kernels"},
    package_data={"grpo_fused": ["py.typed"]},
    ext_modules=native_extensions(),
)
