"""The self-check: the form that was read from a model is compared with what the model itself computes.

The model runs once on eight tokens, its own head in fp32 and on inputs chosen here. The whole forward is run, not only
the head's code or a fake backbone, so that this works for every architecture: only the model's forward contains what
its backbone returns, what is computed between that and the head, and what is done to the logits. A pre-hook on
the head widens its input to fp32 and sets its size, so that the logits reach from 1 to beyond the softcap: on a newly
initialised model a cap would have no visible effect.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from grpo_fused.api.fused_linear import fused_linear_logprobs
from grpo_fused.call.head_parts import HeadAdapter, QuantizedWeight
from grpo_fused.call.layout import blocks
from grpo_fused.engines.accuracy import logp_bound
from grpo_fused.engines.products import VOCAB_BLOCK_BYTES, ieee_products
from grpo_fused.heads.form import HeadForm, candidate_forms, configs
from grpo_fused.heads.hidden import accepts, only_one
from grpo_fused.heads.modules import HeadParts, adapter_state, head_parts, output_head, unwrap
from grpo_fused.heads.patches import Patches, turn
from grpo_fused.heads.quantized import computes_in

NUM_TOKENS = 8
PEAKS = (1.0, 4.0, 16.0, 32.0, 64.0)
"""Largest |logit| of the rows, before a softcap: from where a cap has no effect to where one of 50 removes a third."""

KEPT_FORMS = 64
"""Of a model: the latest states of its head that were checked. Each new hook or adapter makes another."""

_verified: weakref.WeakKeyDictionary[nn.Module, dict[object, HeadForm]] = weakref.WeakKeyDictionary()


class LMHeadInputs(TypedDict):
    """The keyword arguments of the fused functions that describe a head."""

    lm_head_weight: Tensor | QuantizedWeight
    lm_head_bias: Tensor | None
    lm_head_adapter: tuple[HeadAdapter, ...]
    logit_scale: float
    softcap: float | None


def lm_head_inputs(model: nn.Module, *, check: bool = True) -> LMHeadInputs:
    """The arguments of the fused functions that describe a model's head, verified with the model itself.

        fused_linear_logprobs(head_hidden_states(model, ids)[:, :-1], token_ids=ids[:, 1:], **lm_head_inputs(model))

    gives the model's own log-probs, computed in fp32. Call it for each pass: adapters may have been switched. After the
    first call the check is a look-up, repeated when the head's shape or dtype, its config fields, or its active
    adapters change.

    Args:
        model: A Hugging Face causal LM, or any module with `get_output_embeddings()` (or `lm_head`), perhaps a
            `config`, and a forward that takes `input_ids` and returns logits. Wrappers (DDP, torch.compile, peft) are
            unwrapped.
        check: False trusts the config, and costs no pass. True runs `check_head` at the first call; where
            parameters are sharded, on all ranks.

    Returns:
        `lm_head_weight` `[V, H]` and `lm_head_bias` `[V]` or None: the model's own parameters (a view of the first rows
        where the model drops the others' logits); one in 8 or 4 bits is a `QuantizedWeight`.
        `lm_head_adapter`: the unmerged LoRA adapters that are active, with their own parameters. `logit_scale`, a
        float, and `softcap`, a float or None.

    Raises:
        TypeError: No single head; a weight that is quantised in another form, packed or sharded.
        ValueError: A head that the linear form does not express (the message has the model's values); an adapter
            that is not W + s B A; an encoder-decoder.
        RuntimeError: The model does not call its head, or calls it more than once.
    """
    inner = unwrap(model)
    head = output_head(inner)
    parts = head_parts(head)
    form = _confirmed(inner, head, parts) if check else candidate_forms(inner, parts.weight.shape[0])[0]
    return inputs_of(form, parts)


def check_head(model: nn.Module, *, inputs: Mapping[str, object] | None = None, cached: bool = True) -> HeadForm:
    """Runs the model's own head in fp32 on a few hidden states and compares the fused log-probs with it.

    Eight tokens go through the whole model (no gradients, eval mode, no cache). The head gets fp32 copies of its
    parameters and, in place of its input, four of the model's states and four random ones, scaled so that the largest
    logits are 1 to 64 and beyond the softcap. Over the whole vocabulary, the log-softmax of the model's logits must be
    that of the form read from the config, or of another form that its fields can mean; then
    `fused_linear_logprobs` must give the same for a sample of tokens. Modes, parameters, hooks and random states of the
    model are not changed.

    Args:
        model: As for `lm_head_inputs`.
        inputs: Keyword arguments for the model's forward, for one that does not run on `input_ids` alone; about eight
            tokens are enough. `lm_head_inputs` uses what was confirmed with them.
        cached: False repeats a check that was made before.

    Returns:
        `HeadForm(logit_scale, softcap, vocab_size, fields)`: the form that the model confirmed.

    Raises:
        ValueError: No form agrees within 1e-4 * max(1, max|z| / 32) nats.
        RuntimeError: The model's forward fails on these inputs; it does not call its head exactly once.
        TypeError: As `lm_head_inputs`.
    """
    inner = unwrap(model)
    head = output_head(inner)
    return _confirmed(inner, head, head_parts(head), inputs=inputs, cached=cached)


@torch.no_grad()
def _confirmed(
    inner: nn.Module,
    head: nn.Module,
    parts: HeadParts,
    inputs: Mapping[str, object] | None = None,
    cached: bool = True,
) -> HeadForm:
    weight = _values(parts)
    parts = parts._replace(adapters=tuple(replace(adapter, dropout=0.0) for adapter in parts.adapters))
    forms = candidate_forms(inner, weight.shape[0])
    has_bias = None if parts.bias is None else parts.bias.dtype
    hooks = tuple(head._forward_hooks), tuple(head._forward_pre_hooks)
    key = (tuple(forms), weight.shape, weight.dtype, weight.device, has_bias, adapter_state(head), hooks)
    known = _verified.setdefault(inner, {})
    if cached and key in known:
        return known[key]
    inputs = _token_inputs(inner, weight) if inputs is None else inputs
    problems = []
    with turn(head), undisturbed(inner):  # threads would restore each other's settings
        for form in forms:
            rows, logits = _run_own_head(inner, head, parts, form, inputs)
            if problem := _disagreement(rows, logits, parts, form):
                problems.append(problem)
                continue
            _check_fused(rows, logits, parts, form)
            known[key] = form
            while len(known) > KEPT_FORMS:
                del known[next(iter(known))]
            return form
    raise ValueError(
        f"the head of {type(inner).__name__} is not softcap(logit_scale * (h W^T + b)) as its config describes it, so "
        f"fused log-probs would be those of another model. Read: {forms[0]}. The model's own head: {problems[0]}"
        + (f". {len(forms) - 1} other meanings of these fields do not agree either" if len(forms) > 1 else "")
    )


def inputs_of(form: HeadForm, parts: HeadParts) -> LMHeadInputs:
    """The arguments for a head of a confirmed form."""
    weight, bias, adapters = parts
    if form.vocab_size < weight.shape[0]:
        kept = slice(0, form.vocab_size)
        weight, bias = weight[kept], None if bias is None else bias[kept]
        adapters = tuple(replace(adapter, b=adapter.b[kept]) for adapter in adapters)
    return LMHeadInputs(
        lm_head_weight=weight, lm_head_bias=bias, lm_head_adapter=adapters, logit_scale=form.logit_scale,
        softcap=form.softcap,
    )  # fmt: skip


def _values(parts: HeadParts) -> Tensor:
    """The numbers of the weight, quantised or not."""
    return parts.weight.values if isinstance(parts.weight, QuantizedWeight) else parts.weight


def _run_own_head(
    model: nn.Module, head: nn.Module, parts: HeadParts, form: HeadForm, inputs: Mapping[str, object]
) -> tuple[Tensor, Tensor]:
    """[T, H] in fp32, the head's input, and [T, V], the model's logits for it."""
    weight = _values(parts)
    wide = torch.promote_types(weight.dtype, torch.float32) if weight.dtype.itemsize > 1 else torch.float32
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name is None:
        raise RuntimeError(f"the output head of {type(model).__name__} must be one of its modules; it is not")
    parameters = head.named_parameters(name, remove_duplicate=False)
    widened = {
        name: parameter.detach().to(wide)
        for name, parameter in parameters
        if parameter.is_floating_point() and not hasattr(parameter, "quant_state")  # which may store bytes as bf16
    }
    if isinstance(parts.weight, QuantizedWeight):  # torchao's fp8 keeps its dtype, and multiplies in no other
        narrow = [key for key, x in widened.items() if x.dtype != wide]
        widened |= {key: parts.weight.dequantize(wide) for key in narrow}
    rows: list[Tensor] = []
    own_forward = head.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            got = len(args) + len(kwargs)
            raise RuntimeError(f"the model must call its head with the hidden states alone; got {got} arguments")
        with torch.autocast(weight.device.type, enabled=False):
            rows.append(_rows(args[0].to(wide), parts, form))
            output: Tensor = own_forward(rows[-1].view(args[0].shape))
        return output

    with Patches((head, "forward", forward), *computes_in(head, wide)):
        # Only the head's parameters are replaced: tied embeddings must stay in the dtype that the backbone expects.
        try:
            output = torch.func.functional_call(model, widened, (), dict(inputs), tie_weights=False)
        except Exception as error:
            raise RuntimeError(
                f"{type(model).__name__} must run on {', '.join(inputs)} for its head to be checked; it raised "
                f"{type(error).__name__}: {error}. If it needs other inputs, pass them: check_head(model, inputs=...)"
            ) from error
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    logits = output[0] if logits is None else logits
    return only_one(rows), logits.reshape(-1, logits.shape[-1])


def _rows(states: Tensor, parts: HeadParts, form: HeadForm) -> Tensor:
    """[T, H]: the model's own states and random ones in turn, scaled to logits of all sizes in the check."""
    states = states.reshape(-1, states.shape[-1])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(states.shape, generator=generator, dtype=torch.float32, device="cpu").to(states)
    usable = states.isfinite().all(-1) & (states != 0).any(-1)
    usable[1::2] = False
    rows = torch.where(usable.unsqueeze(-1), states, rows)
    largest = _products(rows, parts._replace(bias=None)).abs().amax(-1) * abs(form.logit_scale)
    cap = 16.0 if form.softcap is None else form.softcap
    # the first row stays as large as the model made it
    peaks = itertools.cycle([float(largest[0]), *PEAKS, 0.5 * cap, 2.0 * cap])
    gains = rows.new_tensor(list(itertools.islice(peaks, len(rows)))) / largest
    return rows * gains.where(largest > 0, 1.0).unsqueeze(-1)


def _products(rows: Tensor, parts: HeadParts) -> Tensor:
    """[T, V] = rows W^T + b in the precision of the rows; the weight is converted block by block."""
    size = max(1, VOCAB_BLOCK_BYTES // (rows.element_size() * rows.shape[-1]))
    weights = (parts.weight[block] for block in blocks(parts.weight.shape[0], size))
    dense = (w.to(rows.dtype) if isinstance(w, Tensor) else w.dequantize(rows.dtype) for w in weights)
    products = torch.cat([rows @ w.T for w in dense], dim=-1)
    for adapter in parts.adapters:
        products = products + adapter.scale * (rows @ adapter.a.to(rows.dtype).T) @ adapter.b.to(rows.dtype).T
    return products if parts.bias is None else products + parts.bias


def _token_inputs(model: nn.Module, weight: Tensor) -> dict[str, Any]:
    """Eight ordinary tokens, with a mask if the model takes one."""
    table = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "weight", None)
    table = table if isinstance(table, Tensor) and table.dim() == 2 else weight
    ids = ordinary_tokens(model, min(len(table), len(weight)))
    input_ids = torch.tensor([[ids[(7 * t + 3) % len(ids)] for t in range(NUM_TOKENS)]], device=table.device)
    further = {"attention_mask": torch.ones_like(input_ids), "use_cache": False}
    return {"input_ids": input_ids} | {name: value for name, value in further.items() if accepts(model, name)}


def ordinary_tokens(model: nn.Module, size: int) -> list[int]:
    """Up to 64 ids below `size`: none that the config names as special, since it may represent an image."""
    fields = itertools.chain.from_iterable(vars(source).items() for source in configs(model))
    special = {x for name, x in fields if name.endswith(("_token_id", "_token_index")) and isinstance(x, int)}
    return [i for i in range(min(size, 64 + len(special))) if i not in special] or [0]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, IEEE fp32, eager; everything is restored at the end, also after an exception.

    The attention is the eager one: the head does not depend on it, and fused kernels may need a GPU, half precision or
    packed rows (TRL's asynchronous GRPO).
    """
    devices = {p.device for p in model.parameters()}
    with ExitStack() as stack:
        gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
        stack.enter_context(torch.random.fork_rng(devices=gpus))
        for kind in {"cpu", *(device.type for device in devices)} - {"meta"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(ieee_products())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # not eval(): some modules merge weights there
        stack.enter_context(Patches(*((module, "training", False) for module in model.modules())))
        for config in configs(model):
            attention = getattr(config, "_attn_implementation", None)
            is_property = isinstance(getattr(type(config), "_attn_implementation", None), property)
            if is_property and attention not in (None, "eager", "sdpa"):
                # transformers: a dictionary sets its own, not those of nested configs
                stack.callback(setattr, config, "_attn_implementation", {"": attention})
                setattr(config, "_attn_implementation", {"": "eager"})  # noqa: B010 (mypy knows an object)
        yield


def _disagreement(rows: Tensor, logits: Tensor, parts: HeadParts, form: HeadForm) -> str | None:
    """None if the model's logits are those of the form, else how they differ."""
    head = inputs_of(form, parts)
    if logits.shape != (len(rows), form.vocab_size):
        return f"logits of shape {tuple(logits.shape)}, expected {(len(rows), form.vocab_size)}"
    kept = HeadParts(head["lm_head_weight"], head["lm_head_bias"], head["lm_head_adapter"])
    products = _products(rows, kept).double()
    expected = products * form.logit_scale
    if form.softcap is not None:
        expected = form.softcap * (expected / form.softcap).tanh()
    model_logits = logits.double()
    error = (model_logits.log_softmax(-1) - expected.log_softmax(-1)).abs()
    if (error.amax(-1) <= _allowed(expected)).all():
        return None
    factors = ((model_logits * products).sum(-1) / products.square().sum(-1))[products.abs().amax(-1).argsort()]
    return (
        f"log-probs differ by {float(error.max()):.3g} nats, most at token {int(error.amax(0).argmax())}. From the "
        f"smallest rows to the largest its logits ({logits.dtype}) are {float(factors[0]):.6g} to "
        f"{float(factors[-1]):.6g} times h W^T + b (one number: a scale; falling: a softcap), at most "
        f"{float(model_logits.abs().max()):.6g}"
    )


def _allowed(logits: Tensor) -> Tensor:
    """[T] nats. A bf16 comparison would refuse correct models: its rounding is 6e-2."""
    return logits.new_tensor([logp_bound(largest) for largest in logits.abs().amax(-1).tolist()])


def _check_fused(rows: Tensor, logits: Tensor, parts: HeadParts, form: HeadForm) -> None:
    """The fused function itself, for the likeliest, the least likely and random tokens of each row."""
    log_probs = logits.double().log_softmax(-1)
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(form.vocab_size, (2, len(rows)), generator=generator, device="cpu").to(rows.device)
    ids = torch.stack([log_probs.argmax(-1), log_probs.argmin(-1), *anything])
    fused = fused_linear_logprobs(rows.expand(len(ids), -1, -1), token_ids=ids, **inputs_of(form, parts)).logps
    error = (fused.double() - log_probs.gather(-1, ids.T).T).abs().amax(0)
    if not (error <= _allowed(logits.double())).all():
        raise ValueError(
            f"fused log-probs differ from those of the model's own head by {float(error.max()):.3g} nats, although its "
            f"logits are those of {form}"
        )
