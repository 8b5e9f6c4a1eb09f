"""The head kernels, compiled: every configuration that ships or that the tuner tries, in every mode."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import torch
from grpo_fused.kernels import head_configs

from benchmarks import sass
from benchmarks.compiled import compile_kernel, machine_code, resources
from grpo_fused.engines.cpu_library import BASE_COLUMNS

MODES = {"score": 0, "exponentials": 1, "dlogits": 2}
AROUND = ("finish", "pass")
"""The kernels around them."""
EXTRAS = {"int8-adapter": ("i8", 64), "fp8": ("u8", 0), "adapter": ("", 64)}
"""Kinds of frozen weights: the type of their bytes, and columns of an adapter, of which rank 16 takes 48 in bf16. With
192, rank 64, nothing spills either, but products of Hopper wait for each other."""


@dataclass(frozen=True)
class Variant:
    """A configuration of the head kernel on one architecture."""

    arch: str
    table: str
    """bf16, fp32, extras, or candidate-<number>"""
    mode: str
    """score, exponentials, dlogits; finish and pass are the kernels around them"""
    options: str
    """plain: per-token temperatures and entropies. full: with bias, softcap and entropy gradient. Of extras: a kind of
    frozen weight, and full"""
    even: bool
    """whether H is a multiple of the tile; with descriptors both are the same kernel, and fp32 operands always are"""

    def __str__(self) -> str:
        return f"{self.arch}-{self.table}-{self.mode}-{self.options}-{'even' if self.even else 'odd'}"

    @property
    def ships(self) -> bool:
        """Whether it is more than a candidate of the tuner."""
        return not self.table.startswith("candidate")

    @property
    def hardest(self) -> bool:
        """Whether no other variant of its configuration and mode has more to do."""
        return self.even == self.always_even

    @property
    def always_even(self) -> bool:
        """Whether there is no variant for other H."""
        config = self.config
        whole = self.table == "extras" and config.block_k == BASE_COLUMNS  # frozen columns are a multiple of it
        return self.mode in AROUND or config.tma or self.dtype == "fp32" or whole

    @property
    def is_full(self) -> bool:
        """Whether it has every option."""
        return self.options != "plain"

    @property
    def extras(self) -> dict[str, Any]:
        """The compile-time arguments of a frozen weight."""
        bytes_, columns = EXTRAS.get(self.options, ("", 0))
        absent = [] if bytes_ else ["row_scale_ptr"]
        if columns == 0:  # `x_ptr` of the kernel that finishes scores is no pointer beside a descriptor
            absent += ["more_ptr"] if self.mode == "finish" else ["more_ptr", "x_ptr"]
        steps = -(-columns // self.config.block_k)
        return {"FP8": bytes_ == "u8", "MORE_STEPS": steps, "HAS_ROW_SCALE": bytes_ != "", **dict.fromkeys(absent)}

    @property
    def weight_type(self) -> str:
        """Of the weight's numbers."""
        return EXTRAS.get(self.options, ("", 0))[0] or self.dtype

    @property
    def dtype(self) -> str:
        """Of hidden states, and of a plain weight."""
        return "fp32" if self.table.startswith("fp32") else "bf16"

    @property
    def stored_type(self) -> str:
        """Of exponentials and dlogits: AMD's library has no bf16 products with fp32 results for a widened weight."""
        return "fp32" if self.table == "extras" and self.arch.startswith("gfx") else self.dtype

    @property
    def config(self) -> Any:
        """The `HeadConfig` that this variant compiles."""
        if self.table.startswith("candidate"):
            return head_configs.CANDIDATES[self.arch][int(self.table.split("-")[1])]
        table = _tables()[self.table][self.arch]
        if self.mode == "dlogits":
            return table.gradient
        return table.capped if self.is_full else table.plain


def variants() -> list[Variant]:
    """Everything that ships, in every mode, with few options and with all; candidates as the tuner runs them."""
    made = []
    for name, table in _tables().items():
        all_options = tuple(EXTRAS) if name == "extras" else ("plain", "full")
        modes = [mode for mode in (*MODES, *AROUND) if (name, mode) != ("extras", "pass")]
        for arch, mode, options, even in itertools.product(table, modes, all_options, (True, False)):
            variant = Variant(arch, name, mode, options, even)
            if arch != "interpreter" and (even or not variant.always_even):
                made.append(variant)
    for arch, candidates in head_configs.CANDIDATES.items():
        for number, mode in itertools.product(range(len(candidates)), ("score", "exponentials")):
            made.append(Variant(arch, f"candidate-{number}", mode, "plain", even=True))
    return made


def _tables() -> dict[str, Any]:
    return {
        "bf16": head_configs.HEAD_CONFIGS, "fp32": head_configs.FP32_CONFIGS, "extras": head_configs.EXTRAS_CONFIGS
    }  # fmt: skip


def compile_variant(variant: Variant) -> Any:
    """Triton's compiled kernel, with the alignment that its tensors have at run time."""
    from grpo_fused.kernels import head

    config, full, mode, device = variant.config, variant.is_full, variant.mode, torch.device("cuda")
    flags = {  # of all three kernels
        **variant.extras, "HAS_BIAS": full, "HAS_SOFTCAP": full and mode != "exponentials", "HAS_TEMPERATURES": True,
        "WITH_ENTROPY": mode != "dlogits", "HAS_DENTROPY": full and mode in ("dlogits", *AROUND), "E_SCALE": 1.0,
        "UPCAST": False, "EVEN_K": variant.even, "BLOCK_V": config.block_v, "BLOCK_K": config.block_k,
    }  # fmt: skip
    types = {"x_ptr": variant.dtype, "more_ptr": variant.dtype, "e_ptr": variant.dtype, "w_ptr": variant.weight_type}
    types = {name: f"*{dtype}" for name, dtype in types.items()}
    if mode == "finish":
        finish = head_configs.finish_config(device, torch.float32 if variant.dtype == "fp32" else torch.bfloat16)
        kernel, options = head.finish_scores_fwd_kernel, finish.options
        flags["BLOCK_N"] = finish.block_n
    elif mode == "pass":
        in_place = head_configs.pass_config(device, config.block_v)
        kernel, options = head.exponentials_bwd_kernel, {"num_warps": in_place.num_warps, "enable_fp_fusion": False}
        flags["TILES"] = in_place.tiles
    else:
        stages = config.num_stages if mode == "score" else config.store_stages
        kernel = head.head_fwd_kernel
        options = {"num_warps": config.num_warps, "num_stages": stages, "enable_fp_fusion": False}
        flags |= {"MODE": MODES[mode], "HAS_ROW_OFFSETS": mode == "exponentials", "TMA": config.tma}
        flags |= {"BLOCK_N": config.block_n} | ({"out": None} if mode == "score" else {})
        flags |= {"count_ptr": None} if mode == "dlogits" or variant.dtype == "fp32" else {}
        for name, dtype, rows, cols in (
            ("x", variant.dtype, config.block_n, config.block_k),
            ("w", variant.weight_type, config.block_v, config.block_k),
            ("out", variant.stored_type, config.block_n, config.block_v),
        ):
            types[name] = f"tensordesc<{dtype}[{rows}, {cols}]>" if config.tma else f"*{dtype}"
    types = _types(kernel) | types
    return compile_kernel(kernel, variant.arch, types, flags, _aligned(kernel, types), **options)


def _types(kernel: Any) -> dict[str, str]:
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    return (
        types
        | {"targets_ptr": "*i64", "count_ptr": "*i64"}
        | dict.fromkeys(("temperature", "logit_scale", "softcap"), "fp32")
    )


PER_TOKEN = {"targets_ptr", "temperature_ptr", "log_sum_ptr", "logp_ptr", "entropy_ptr", "dlogp_ptr", "dentropy_ptr",
             "count_ptr"}  # fmt: skip
"""Slices with any start address."""


def _aligned(kernel: Any, types: dict[str, str]) -> set[str]:
    names = {name for name in kernel.arg_names if types[name].startswith("*")} - PER_TOKEN
    return names | {"stride_out", "stride_e", "padded", "stride_xn", "stride_wv", "stride_mv", "H", "C"}


def inspect(variant: Variant) -> dict[str, Any]:
    """Compile `variant` and read its properties: its resources, and

    - `tensor_cores`: the instruction that multiplies: wgmma, tcgen05, mma, mfma, fma, or none
    - `tma`, and `narrow_stores`, those of single 16-bit elements
    - `serialized`: whether ptxas makes tensor-core products wait for each other
    - `instructions` of a thread for the row work of a logit (sm_90 only)
    """
    compiled = compile_variant(variant)
    found = {**resources(compiled, variant.arch), "tma": False, "serialized": False, "instructions": None}
    if variant.arch.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        names, found["narrow_stores"] = {"v_mfma": "mfma"}, text.count("store_short")
    else:
        text = compiled.asm["ptx"]
        names = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05", "mma.sync": "mma"}
        found |= {"narrow_stores": text.count("st.global.b16"), "tma": "cp.async.bulk.tensor" in text}
    cores = next((short for long, short in names.items() if long in text), "none" if variant.mode == "pass" else "fma")
    if cores == "wgmma":
        listing = machine_code(compiled)
        found["serialized"] = sass.is_serialized(listing)
        if row_work := sass.tile_instructions(listing):
            tile = variant.config.block_n * variant.config.block_v
            found["instructions"] = round(sum(row_work.values()) * 32 * variant.config.num_warps / tile, 1)
    return found | {"tensor_cores": cores}


def table() -> list[dict[str, Any]]:
    """A row for each variant."""
    return [{**asdict(variant), **variant.config._asdict(), **inspect(variant)} for variant in variants()]
