"""verl on our kernels: one line in place of its fused heads (torch, liger, triton), for its FSDP workers.

    from grpo_fused.integrations.verl import patch_verl
    patch_verl()                      # in every worker, before it builds its model; model.use_fused_kernels=True

`unpatch_verl()` undoes it. Releases of verl that are known: see `SUPPORTED`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grpo_fused import HeadAdapter, fused_linear_logprobs
from grpo_fused.heads import HeadForm, check_head, head_hidden_states, lm_head_inputs
from grpo_fused.heads.check import inputs_of, undisturbed
from grpo_fused.heads.form import candidate_forms
from grpo_fused.heads.modules import HeadParts, adapters_beside, needs_a_gpu, output_head
from grpo_fused.heads.patches import Patches, everywhere
from grpo_fused.integrations.context import holding
from grpo_fused.integrations.releases import check_release

SUPPORTED = {"0.9": "FusedLinearForPPO, linear_cross_entropy, patch_forward_with_backends"}
"""Release (all patch releases of it) to what of it is replaced."""

BACKENDS = ("torch", "liger", "triton")
OWN_BACKBONES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "qwen3_5", "qwen3_5_moe")
"""Model types whose backbone gets forwards of verl's own, for a GPU: not run here. Their heads are plain products."""

_FUSED_FORWARDS = ("forward_with_torch_backend", "forward_with_triton_backend")
"""Names of verl's forwards that score tokens, in its modules of several architectures."""

_patches = Patches()
_forwards: dict[type, Patches] = {}
"""Of a class of models the one of its forward, on top of what verl has put there last."""
_own_forwards: dict[type, Callable[..., Any]] = {}
"""Of a class of models its forward before verl replaced it; `unpatch_verl` leaves verl's there."""
_model: ContextVar[Any] = ContextVar("grpo_fused_verl_model", default=None)
"""The model whose forward is running; its `_grpo_fused_form` is the `HeadForm` of its head."""


def patch_verl() -> None:
    """Score tokens by `fused_linear_logprobs` wherever verl's workers use fused kernels, until `unpatch_verl`.

    Log-probs and entropies are fp32 and differentiable, for padded, packed and Ulysses-sliced inputs. A scale or cap of
    the logits, which verl's fused forwards leave out (Gemma 2, Cohere, Granite), is applied; so is LoRA on the head,
    which they would never train. When verl patches a model, its head is compared with the model's own forward.

    Raises:
        ImportError: verl is not installed, or is no release of `SUPPORTED`.
        ValueError, TypeError, RuntimeError: Later, when verl patches a model or runs it: a head that the fused form
            does not express, or that verl reads wrongly (a bias, a transform before the head, an adapter on it that is
            no LoRA), or a class of models that verl patched before.
    """
    global _patches
    check_release("verl", SUPPORTED)
    if _patches.names:
        return
    products = importlib.import_module("verl.utils.experimental.torch_functional")
    kernels = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    models = importlib.import_module("verl.models.transformers.monkey_patch")
    _patches = Patches(
        *everywhere(products, "FusedLinearForPPO", FusedLinearForPPO),
        *everywhere(kernels, "linear_cross_entropy", linear_cross_entropy),
        *everywhere(models, "patch_forward_with_backends", _checking(models.patch_forward_with_backends)),
    )


def unpatch_verl() -> None:
    """Put back what `patch_verl` replaced; models that verl has patched keep verl's own fused forward."""
    for patches in (_patches, *_forwards.values()):
        patches.undo()
    _forwards.clear()


class FusedLinearForPPO(nn.Module):
    """Replaces `verl.utils.experimental.torch_functional.FusedLinearForPPO`; its arguments have no effect."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies in fp32, each shaped like input_ids `[..., T]`, of states `[..., T, H]`."""
        model = _model.get()
        if model is None:
            return _scores(hidden_states, vocab_weights, input_ids, temperature)
        head, is_sharded = model.lm_head, isinstance(model.lm_head, FSDPModule)
        form = getattr(model, "_grpo_fused_form", None)  # of a model that was patched, not only its class

        def score(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            bias, adapters = adapters_beside(head, None)
            if bias is not None:
                raise ValueError("verl's fused forward has no bias; the head's adapter has one: set lora_bias to False")
            weight = head.weight if is_sharded else vocab_weights
            return _scores(hidden_states, weight, input_ids, temperature, form, adapters)

        if not is_sharded:
            return score(hidden_states)
        with Patches((head, "forward", score)):  # its hooks gather the weight, in FSDP's dtype, and reduce its gradient
            scores: tuple[Tensor, Tensor] = head(hidden_states)
        return scores


def _scores(
    hidden_states: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    temperature: float,
    form: HeadForm | None = None,
    adapters: tuple[HeadAdapter, ...] = (),
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    head = inputs_of(form or HeadForm(1.0, None, weight.shape[0]), HeadParts(weight, None, adapters))
    out = fused_linear_logprobs(
        hidden_states, token_ids=input_ids, temperature=temperature, with_entropy=True, process_group=process_group,
        **head,
    )  # fmt: skip
    assert out.entropies is not None
    return out.logps, out.entropies


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Replaces `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy`: log-probs and entropies, fp32, `[N]`.

    Args:
        hidden: `[..., H]`
        weight: `[V, H]`, or the rank's slice of the vocabulary.
        labels: `[...]`, ids of the whole vocabulary.
        temperature: what logits are divided by
        reduction: "none"
        dist_process_group: Megatron's tensor-parallel group. As with verl's kernel, the gradients of the hidden states
            are to be summed over its ranks, which Megatron's sequence parallelism does.

    Raises:
        ValueError: A reduction other than "none".
    """
    if reduction != "none":
        raise ValueError(f'reduction must be "none", as in all of verl; got {reduction!r}')
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if dist_process_group is None or dist_process_group.size() == 1:
        return FusedLinearForPPO()(hidden, weight, labels, temperature)
    if hidden.requires_grad:  # ours is the sum already, on each rank
        hidden = hidden.view_as(hidden)
        hidden.register_hook(lambda gradient: gradient / dist_process_group.size())
    return _scores(hidden, weight, labels, temperature, process_group=dist_process_group)


def _checking(patch_forward_with_backends: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(patch_forward_with_backends)
    def patch_checked_forward(
        model: nn.Module, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
    ) -> None:
        kind = type(model)
        model_forward = _own_forwards.setdefault(kind, kind.forward)
        if use_fused_kernels and getattr(model_forward, "__name__", "") in _FUSED_FORWARDS:
            raise RuntimeError(f"verl patched {kind.__name__} before patch_verl(): call it before any model is built")
        patch_forward_with_backends(model, use_fused_kernels, fused_kernels_backend)
        verl_forward = kind.forward
        # verl 0.9.0 leaves the forward as it is for a backend that it does not have
        is_verls = verl_forward is not model_forward and not hasattr(verl_forward, "knows_its_head")
        if use_fused_kernels and fused_kernels_backend in BACKENDS and is_verls:
            fused_forward = _known_to_its_head(verl_forward)
            # an attribute: copies of the model have it, too
            model._grpo_fused_form = _read_head(model, model_forward, fused_forward)  # type: ignore[assignment]
            _forwards[kind] = Patches((kind, "forward", fused_forward))

    return patch_checked_forward


def _known_to_its_head(verl_forward: Callable[..., Any]) -> Callable[..., Any]:
    """verl's forward, which hands its head the weight alone, with the rest of the head known."""

    @functools.wraps(verl_forward)
    def fused_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with holding(_model, self):
            return verl_forward(self, *args, **kwargs)

    fused_forward.knows_its_head = True  # type: ignore[attr-defined]
    return fused_forward


@torch.no_grad()
def _read_head(model: nn.Module, model_forward: Callable[..., Any], fused_forward: Callable[..., Any]) -> HeadForm:
    """The form of the head, compared with the model's own forward where its weights are here."""
    name, head = type(model).__name__, output_head(model)
    if head is not getattr(model, "lm_head", None) or getattr(head, "bias", None) is not None:
        raise ValueError(
            f"verl's fused forward multiplies by model.lm_head.weight alone; {name} must have this head, without a bias"
        )
    form = candidate_forms(model, head.weight.shape[0])[0]  # type: ignore[union-attr]
    backbone = str(getattr(getattr(model, "config", None), "model_type", ""))
    # FSDP has weights on the first rank only; verl puts Liger's layers in while they are on the CPU
    if backbone in OWN_BACKBONES or any(p.is_meta for p in model.parameters()) or needs_a_gpu(model):
        return form
    ids = torch.arange(1, 9, device=head.weight.device).remainder(form.vocab_size).unsqueeze(0)  # type: ignore[union-attr]
    with Patches((model, "forward", functools.partial(model_forward, model))):
        confirmed = check_head(model)
        with undisturbed(model):
            hidden = head_hidden_states(model, ids)
        want = fused_linear_logprobs(hidden[:, :-1], token_ids=ids[:, 1:], **lm_head_inputs(model)).logps
    if confirmed[:3] != form[:3]:  # the ranks without weights take the first
        raise ValueError(f"the head of {name} is {confirmed}, which is not the usual meaning of its config: {form}")
    model._grpo_fused_form = form  # type: ignore[assignment]
    with undisturbed(model):
        got = fused_forward(model, input_ids=ids, return_dict=True, use_cache=False).log_probs
    if not torch.allclose(got.view(ids.shape)[:, :-1], want, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"verl's fused forward takes the backbone's last hidden states, and {name} does something to them before "
            "its head: its log-probs would be wrong"
        )
    return form
