"""Implementations of the same GRPO loss, ours and the peers', with one interface.

A provider takes a `Problem` and returns the loss; gradients go to `hidden` and `weight`. Peers that give log-probs only
are completed by the loss formula in plain torch, as their users do; `composition` says so for each. For a
kernel without a mask, the active tokens are selected first, as TRL does for its own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F

from benchmarks.problem import (
    EPSILON,
    PATTERNS,
    TEMPERATURE,
    PerToken,
    cross_entropy,
    loss_from_logps,
    old_of,
    per_token_loss,
)  # fmt: skip
from grpo_fused import GRPOLossConfig, GRPOLossOutput, fused_linear_grpo_loss
from grpo_fused.engines import cuda_rows, libraries
from grpo_fused.engines import triton as triton_engine
from grpo_fused.testing import Problem

ON_TOP = "loss formula in plain torch on top"
CONFIG = GRPOLossConfig(epsilon=EPSILON)


@dataclass(frozen=True)
class Provider:
    """One way to compute the loss."""

    name: str
    composition: str
    """the provider's own code, and the formula on top"""
    loss: Callable[[Problem], Tensor]
    logps: Callable[[Problem], Tensor] | None = None
    """[B, T], any values where masked; None if the provider has none"""
    ours: bool = False
    """whether our bound on log-probs applies"""
    packages: tuple[str, ...] = ()
    """top-level packages that it needs"""
    devices: tuple[str, ...] = ("cpu", "cuda")
    needs: Callable[[str], str | None] = lambda device: None
    """why it cannot run on this device, or None"""
    compiles: bool = False
    """compiles at its first call of a shape"""
    always_gradients: bool = False
    """its forward calls backward itself, so it has no forward without gradients"""
    patterns: tuple[str, ...] = tuple(PATTERNS)
    """where it differs from the others"""
    per_token: PerToken = per_token_loss
    """the loss of a token, if it has another"""

    def unavailable(self, device: str) -> str | None:
        """Why it cannot run here, or None; an installed package may still fail to import."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        absent = [package for package in self.packages if importlib.util.find_spec(package) is None]
        return f"{absent[0]} is not installed" if absent else self.needs(device)


def fused_loss(p: Problem, impl: str, **options: Any) -> GRPOLossOutput:
    """Our loss of a problem, with the options of the timed one."""
    return fused_linear_grpo_loss(
        p.hidden_states, p.lm_head_weight, p.completion_ids, p.advantages, p.completion_mask,
        old_per_token_logps=old_of(p), temperature=TEMPERATURE, config=CONFIG, impl=impl,
        **options,
    )  # fmt: skip


def _engine(impl: str, devices: tuple[str, ...], needs: Callable[[str], str | None] = lambda device: None) -> Provider:
    return Provider(
        impl,
        f"fused_linear_grpo_loss(impl={impl!r}), metrics and entropies included",
        lambda p: fused_loss(p, impl).loss,
        lambda p: p.score(impl),
        ours=True,
        devices=devices,
        needs=needs,
    )


def _from_logps(name: str, composition: str, logps: Callable[[Problem], Tensor], **options: Any) -> Provider:
    """A provider of log-probs, completed by the formula."""
    return Provider(name, f"{composition}; {ON_TOP}", lambda p: loss_from_logps(logps(p), p), logps, **options)


def _of_active(negative_logps: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Problem], Tensor]:
    """Log-probs of a cross-entropy over [n, H], [V, H] and [n]: active tokens selected, results scattered back."""

    def logps(p: Problem) -> Tensor:
        taken = -negative_logps(
            p.hidden_states[p.completion_mask], p.lm_head_weight, p.completion_ids[p.completion_mask]
        ).float()
        return taken.new_zeros(p.completion_mask.shape).masked_scatter(p.completion_mask, taken)

    return logps


def eager_logps(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """All logits in the head's dtype, then fp32, as in a model's forward."""
    logits = (hidden @ weight.T).float() / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@functools.cache
def _compiled_logps() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return torch.compile(eager_logps, dynamic=False)


def _torch_chunked(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    if not hidden.is_cuda:  # its own choice, 2 tokens at N = 240, V = 32000, is tens of times slower than one chunk
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256, chunking_method=None)
    return F.linear_cross_entropy(hidden, weight, ids, reduction="none", options=options)


def _with_trl_head(device: str) -> str | None:
    found = version("trl")
    return None if Version(found) >= Version("1.15") else f"trl {found} has no fused head, 1.15 has"


def _trl(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    return -ChunkedLogProbFunction.apply(hidden, weight, None, ids, TEMPERATURE, chunk, None, 1.0, ("entropy",))[0]


def _liger(p: Problem) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    module = LigerFusedLinearGRPOLoss(
        beta=0.0, epsilon_low=EPSILON, epsilon_high=EPSILON, loss_type="dapo", use_ref_model=False,
        temperature=TEMPERATURE, compiled=p.hidden_states.is_cuda,
    )  # fmt: skip
    return module(
        p.hidden_states, p.lm_head_weight, p.completion_ids, p.completion_mask.to(torch.float32), p.advantages,
        old_per_token_logps=old_of(p),
    )[0]  # fmt: skip


def _logits_for_liger(p: Problem) -> Tensor:
    """[B, T + 1, V]: its kernels take the logits of a model, one position more than the completion."""
    return F.pad(p.hidden_states, (0, 0, 0, 1)) @ p.lm_head_weight.T


def _liger_triton(p: Problem) -> Tensor:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    return triton_grpo_loss(
        _logits_for_liger(p), old_of(p), None, p.completion_ids, p.advantages, p.completion_mask.int(),
        temperature=TEMPERATURE, beta=0.0, eps_low=EPSILON, eps_high=EPSILON, loss_type="dapo", reduce=True,
    )[0]  # fmt: skip


def _liger_triton_logps(p: Problem) -> Tensor:
    """Without gradient; its authors use it for old and reference log-probs."""
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

    return fused_selective_log_softmax(_logits_for_liger(p), p.completion_ids, TEMPERATURE, p.completion_mask.int())


def _cce(hidden: Tensor, weight: Tensor, ids: Tensor, *, filter_eps: str | None) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, ids, reduction="none", filter_eps=filter_eps, impl="cce")


def _liger_scaled(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"  # it would wait for the device
    return LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, ids, TEMPERATURE)


def _quack(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    from quack.linear_cross_entropy import linear_cross_entropy_func

    return linear_cross_entropy_func(hidden, weight, None, ids, reduction="none", inplace_backward=True)


def _quack_mean(p: Problem) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    mask = p.completion_mask
    return chunked_linear_cross_entropy(
        p.hidden_states[mask], p.lm_head_weight, p.completion_ids[mask], reduction="mean"
    )


@functools.cache
def of_file(name: str) -> ModuleType:
    """A module by its file alone: importing torchtitan.experiments.rl needs vLLM, unsloth_zoo a GPU."""
    package, *path = name.split(".")
    installed = importlib.util.find_spec(package)
    return module_of(Path(installed.origin).parent.joinpath(*path).with_suffix(".py"), name)


def module_of(path: Path, name: str) -> ModuleType:
    """A file as the module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_inits(name: str) -> ModuleType:
    """A module whose packages are not run: those of verl need Ray and more."""
    for package in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
        if package not in sys.modules:
            spec = importlib.util.find_spec(package)
            sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(name)


def _torchtitan(p: Problem) -> Tensor:
    """Its wrapper writes the gradient of the weight at once, and hands that of the hidden states to `backward`."""
    from torchtitan.components.loss import ChunkedLossWrapper

    dapo = of_file("torchtitan.experiments.rl.losses.dapo").DAPOLoss
    config = dapo.Config(ratio_clip_low=EPSILON, ratio_clip_high=EPSILON)
    wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config(loss_fn=config))
    wrapper.set_lm_head(functools.partial(F.linear, weight=p.lm_head_weight))
    return wrapper(
        p.hidden_states, p.completion_ids, p.completion_mask.sum(), generator_logprobs=old_of(p),
        advantages=p.advantages.unsqueeze(1).expand_as(p.completion_ids), loss_mask=p.completion_mask,
    )[0]  # fmt: skip


def _unsloth_logps(p: Problem) -> Tensor:
    return of_file("unsloth_zoo.fused_losses.fused_linear").fused_linear_logprobs(
        p.hidden_states, p.lm_head_weight, p.completion_ids, mask=p.completion_mask, temperature=TEMPERATURE
    )


def _verl(hidden: Tensor, weight: Tensor, ids: Tensor, *, backward: str) -> Tensor:
    head, kernels = (without_inits(f"verl.utils.kernel.{name}") for name in ("linear_cross_entropy", "kernels"))
    kernels.set_backward_method(getattr(kernels.BackwardEnum, backward))
    return -head.linear_cross_entropy(hidden, weight, ids, TEMPERATURE, "none")[0]


def _with_linear_cross_entropy(device: str) -> str | None:
    return None if hasattr(F, "linear_cross_entropy") else f"torch {torch.__version__} has no linear_cross_entropy"


def _triton_missing(device: str) -> str | None:
    return triton_engine.unavailable(torch.device(device), torch.bfloat16)


def _on(*capabilities: int) -> Callable[[str], str | None]:
    """For these major compute capabilities."""

    def reason(device: str) -> str | None:
        major, minor = torch.cuda.get_device_capability()
        words = " or ".join(f"{c}.x" for c in capabilities)
        return None if major in capabilities else f"needs compute capability {words}, this is {major}.{minor}"

    return reason


GPU = ("cuda",)
QUACK = ("quack", "cutlass")
"""Its kernels, as those of `liger-scaled`, are in CUTLASS's Python language."""
_ALL = (
    _engine("native", ("cpu",), lambda device: libraries.cpu_available()),
    _engine("chunked", ("cpu", "cuda")),
    _engine("cuda", GPU, lambda device: cuda_rows.unavailable()),
    _engine("triton", GPU, _triton_missing),
    Provider(
        "ours-lean",
        "fused_linear_grpo_loss(impl='auto', with_metrics=False): rows of zero advantage are not even scored",
        lambda p: fused_loss(p, "auto", with_metrics=False).loss,
        ours=True,
        patterns=("zero-advantage-40",),
    ),
    _from_logps(
        "eager", "all logits in the head's dtype, then log_softmax in fp32",
        lambda p: eager_logps(p.hidden_states, p.lm_head_weight, p.completion_ids),
    ),
    _from_logps(
        "torch.compile", "eager's log-probs under torch.compile",
        lambda p: _compiled_logps()(p.hidden_states, p.lm_head_weight, p.completion_ids), compiles=True,
    ),
    _from_logps(
        "torch-lce", "torch.nn.functional.linear_cross_entropy(reduction='none')",
        _of_active(lambda h, w, ids: F.linear_cross_entropy(h, w, ids, reduction="none")),
        needs=_with_linear_cross_entropy,
    ),
    _from_logps(
        "torch-lce-chunked",
        "the same with options=LinearCrossEntropyOptions(): precision and chunks its own choice, on a CPU 256 tokens",
        _of_active(_torch_chunked), needs=_with_linear_cross_entropy,
    ),
    _from_logps(
        "trl", "trl.kernels.ChunkedLogProbFunction, entropies included", _of_active(_trl), packages=("trl",),
        needs=_with_trl_head,
    ),
    Provider(
        "liger", "LigerFusedLinearGRPOLoss in chunks of a sequence; on a CPU not compiled", _liger,
        packages=("liger_kernel",),
    ),
    Provider(
        "torchtitan", "ChunkedLossWrapper around its DAPOLoss, entropies included, nothing on top", _torchtitan,
        packages=("torchtitan", "spmd_types", "triton", "tyro"), always_gradients=True,
    ),
    _from_logps(
        "unsloth",
        "unsloth_zoo's fused_linear_logprobs, which its GRPO trainer calls; its Triton kernels run on a GPU only",
        _unsloth_logps, packages=("unsloth_zoo",),
    ),
    Provider(
        "liger-triton", "all logits by an eager product, then triton_grpo_loss", _liger_triton, _liger_triton_logps,
        packages=("liger_kernel",), devices=GPU,
    ),
    _from_logps(
        "liger-scaled", "LigerFusedLinearScaledCrossEntropyFunction by its kernels for sm_90, targets not validated",
        _of_active(_liger_scaled), packages=("liger_kernel", "cutlass"), devices=GPU, needs=_on(9),
    ),
    _from_logps(
        "cce", "Apple's linear_cross_entropy as shipped: small probabilities are left out of its gradients",
        _of_active(lambda h, w, ids: _cce(h, w, ids, filter_eps="high")), packages=("cut_cross_entropy",), devices=GPU,
    ),
    _from_logps(
        "cce-exact", "Apple's linear_cross_entropy, filter_eps=None",
        _of_active(lambda h, w, ids: _cce(h, w, ids, filter_eps=None)), packages=("cut_cross_entropy",), devices=GPU,
    ),
    _from_logps(
        "quack",
        "linear_cross_entropy_func(reduction='none'), all logits: its chunked form gives a sum or a mean only, and no "
        "gradient for each token",
        _of_active(_quack), packages=QUACK, devices=GPU, needs=_on(9, 10, 12),
    ),
    Provider(
        "quack-mean",
        "another loss, the mean cross-entropy, by its fastest head: chunked_linear_cross_entropy(reduction='mean')",
        _quack_mean, packages=QUACK, devices=GPU, needs=_on(9, 10, 12), patterns=("dense", "half-inactive"),
        per_token=cross_entropy,
    ),
    _from_logps(
        "verl", "verl's Triton linear_cross_entropy as shipped, entropies included: dlogits of 9504 entries at a time",
        _of_active(lambda h, w, ids: _verl(h, w, ids, backward="_Split_Dlogits_N")), packages=("verl", "triton"),
        devices=GPU,
    ),
    _from_logps(
        "verl-separate", "the same with all dlogits at once, the faster of its backward passes (_Total_Separate)",
        _of_active(lambda h, w, ids: _verl(h, w, ids, backward="_Total_Separate")), packages=("verl", "triton"),
        devices=GPU,
    ),
)  # fmt: skip

PROVIDERS: dict[str, Provider] = {provider.name: provider for provider in _ALL}
PEERS = tuple(provider.name for provider in _ALL if not provider.ours)


def available(device: str, pattern: str, peers: Iterable[str] = PEERS) -> dict[str, Provider]:
    """Our engines and the named peers that can run here and for which the pattern makes a difference."""
    named = set(peers)
    return {
        name: provider
        for name, provider in PROVIDERS.items()
        if (provider.ours or name in named) and pattern in provider.patterns and provider.unavailable(device) is None
    }
