"""The jobs of ranks in the tests; results are plain numbers and arrays."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from distributed.traffic import Traffic, counting
from helpers import Case, Result, pack

from grpo_fused import (
    GRPOLossConfig,
    HeadAdapter,
    ParallelGroups,
    QuantizedWeight,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    fused_linear_objective,
)
from grpo_fused.api import pipeline
from grpo_fused.engines.chunked import Slab
from grpo_fused.engines.rows import TorchRows
from grpo_fused.ranks.parallel import VocabParallel


def plain(result: Result, traffic: Traffic) -> dict[str, Any]:
    """Tensors as arrays, to send between processes."""
    out = result.out
    values = {"loss": out.loss, "logps": out.per_token_logps, **result.gradients(), **out.metrics}
    if out.entropies is not None:
        values["entropies"] = out.entropies
    arrays = {name: x.detach().double().numpy() for name, x in values.items()}
    return {**arrays, "calls": dict(traffic.calls), "numbers": dict(traffic.numbers)}


def slices(sizes: list[int]) -> list[slice]:
    """Rows of the ranks."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def of_vocabulary(case: Case, part: slice) -> Case:
    """The case with some rows of its head."""
    bias = case.options.get("lm_head_bias")
    options = {**case.options, "lm_head_bias": None if bias is None else bias[part]}
    return Case(case.hidden_states, case.lm_head_weight[part], case.completion_ids, case.advantages,
                case.completion_mask, options)  # fmt: skip


def vocab_loss(rank: int, group: Any, case: Case, config: Any, impl: str, sizes: list[int], options: dict) -> dict:
    """The loss with a slice of the head on every rank."""
    mine = of_vocabulary(case, slices(sizes)[rank])
    with counting() as traffic:
        result = mine.run(config, impl=impl, process_group=group, **options)
    return plain(result, traffic)


def vocab_logprobs(rank: int, group: Any, case: Case, impl: str, sizes: list[int], frozen: bool = False) -> dict:
    """Log-probs and entropies, and gradients of a loss of both."""
    mine = of_vocabulary(case, slices(sizes)[rank])
    hidden = mine.hidden_states.detach().requires_grad_()
    weight = mine.lm_head_weight.detach().requires_grad_(not frozen)
    out = fused_linear_logprobs(
        hidden, weight, mine.completion_ids, mine.completion_mask, with_entropy=True, impl=impl, process_group=group
    )
    (out.logps.sin().sum() + (out.entropies * 0.3).sum()).backward()
    arrays = {"logps": out.logps, "entropies": out.entropies, "dhidden": hidden.grad, "dweight": weight.grad}
    return {name: x.detach().double().numpy() for name, x in arrays.items() if x is not None}


def vocab_parts(
    rank: int, group: Any, tensors: dict[str, torch.Tensor], scale: torch.Tensor | None, impl: str, sizes: list[int]
) -> dict:
    """Log-probs with an adapter, on slices of a weight that is quantised if it has a scale."""
    part = slices(sizes)[rank]
    hidden, a = (tensors[name].clone().requires_grad_() for name in ("hidden", "a"))
    b, weight = tensors["b"][part].clone().requires_grad_(), tensors["weight"][part]
    out = fused_linear_logprobs(
        hidden, weight if scale is None else QuantizedWeight(weight, scale[part]), tensors["ids"], tensors["mask"],
        lm_head_adapter=HeadAdapter(a, b, 0.7), impl=impl, process_group=group, with_entropy=True,
    )  # fmt: skip
    (out.logps.sin().sum() + (out.entropies * 0.3).sum()).backward()
    arrays = {"logps": out.logps, "entropies": out.entropies, "dhidden": hidden.grad, "da": a.grad, "db": b.grad}
    return {name: x.detach().double().numpy() for name, x in arrays.items()}


def rows_of(case: Case, rows: slice | torch.Tensor) -> Case:
    """Some sequences of a padded case."""
    size = case.completion_ids.shape[0]

    def part(x: Any) -> Any:
        return x[rows] if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == size else x

    options = {name: part(value) if name != "lm_head_bias" else value for name, value in case.options.items()}
    return Case(part(case.hidden_states), case.lm_head_weight, part(case.completion_ids), part(case.advantages),
                part(case.completion_mask), options)  # fmt: skip


def vocab_alternatives(rank: int, group: Any, case: Case, impl: str, sizes: list[int], sets: Any) -> dict:
    """The loss of an objective of alternatives, their log-probs, and gradients."""
    mine = of_vocabulary(case, slices(sizes)[rank])
    given = {name: x for name, x in mine.options.items() if name in ("lm_head_bias", "temperature", "candidates")}
    found = {}
    for what in ("objective", "logprobs"):
        hidden = mine.hidden_states.detach().requires_grad_()
        weight = mine.lm_head_weight.detach().requires_grad_()
        common = {"impl": impl, "process_group": group, "alternatives": sets, "with_entropy": True, **given}
        args = hidden, weight, mine.completion_ids
        if what == "objective":
            out = fused_linear_objective(*args, of_alternatives, mine.completion_mask, **common)
            out.loss.backward()
            found["loss"] = out.loss
        else:
            scores = fused_linear_logprobs(*args, mine.completion_mask, **common)
            (scores.logps.sin().sum() + scores.alternative_logps.cos().sum() + scores.entropies.sum()).backward()
            found["alternative_logps"] = scores.alternative_logps
        found |= {f"dhidden of {what}": hidden.grad, f"dweight of {what}": weight.grad}
    return {name: x.detach().double().numpy() for name, x in found.items() if x is not None}


def vocab_differences(rank: int, group: Any, case: Case, impl: str, sizes: list[int], sets: Any) -> dict:
    """Gradients of the sum of log-probs of alternatives, one for each token, less those of the targets."""
    mine = of_vocabulary(case, slices(sizes)[rank])
    found = {}
    for what in ("objective", "logprobs"):
        hidden = mine.hidden_states.detach().requires_grad_()
        weight = mine.lm_head_weight.detach().requires_grad_()
        args, common = (hidden, weight, mine.completion_ids), {"impl": impl, "process_group": group}
        if what == "objective":
            fused_linear_objective(*args, less_the_target, alternatives=sets, **common).loss.backward()
        else:
            scores = fused_linear_logprobs(*args, alternatives=sets, **common)
            (scores.alternative_logps.sum() - scores.logps.sum()).backward()
        found |= {f"dhidden of {what}": hidden.grad, f"dweight of {what}": weight.grad}
    return {name: x.double().numpy() for name, x in found.items() if x is not None}


def less_the_target(logps, entropies, *, alternative_logps, alternative_offsets):
    """Of one alternative for each token: derivatives that cancel, so that other tokens have no gradient."""
    return alternative_logps - logps


def vocab_divergence(rank: int, group: Any, case: Case, sizes: list[int], other: Any, options: dict) -> dict:
    """The divergence of slices of two heads, or from a teacher's top K, and gradients."""
    part = slices(sizes)[rank]
    mine = of_vocabulary(case, part)
    hidden = mine.hidden_states.detach().requires_grad_()
    weight = mine.lm_head_weight.detach().requires_grad_()
    states, other_weight = (None, None) if other is None else (other[0], other[1][part])
    impl = {"impl": "reference"} if group is None else {"process_group": group}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # pytest's filters are not those of this process
        out = fused_linear_divergence(
            hidden, weight, states, other_weight, mine.completion_mask, temperature=0.8,
            lm_head_bias=mine.options.get("lm_head_bias"), **impl, **options,
        )  # fmt: skip
    (out.loss * 1.5).backward()
    found = {"loss": out.loss, "divergence": out.divergence, "entropies": out.entropies}
    return {
        name: x.detach().double().numpy()
        for name, x in (found | {"dhidden": hidden.grad, "dweight": weight.grad}).items()
    }


def refused_divergence(rank: int, group: Any) -> str:
    """The error of a divergence of ranks with other tokens."""
    hidden, weight = torch.zeros(3, 4), torch.zeros(5, 4)
    try:
        fused_linear_divergence(hidden, weight, hidden, weight, process_group=ParallelGroups(tokens=group))
    except ValueError as error:
        return str(error)
    return "no error"


def of_alternatives(logps, entropies, *, alternative_logps, alternative_offsets):
    """Of targets, entropies, alternatives and their number."""
    owner = torch.repeat_interleave(alternative_offsets.diff())
    total = torch.zeros_like(logps).index_add(0, owner, alternative_logps.sin())
    return total * logps.exp() + logps + 0.1 * entropies


def columns_of(case: Case, columns: slice) -> Case:
    """Some positions of every sequence of a padded case."""
    shape = case.completion_ids.shape

    def part(x: Any) -> Any:
        return x[:, columns] if isinstance(x, torch.Tensor) and x.shape[:2] == shape else x

    options = {name: part(value) if name != "lm_head_bias" else value for name, value in case.options.items()}
    return Case(part(case.hidden_states), case.lm_head_weight, part(case.completion_ids), part(case.advantages),
                part(case.completion_mask), options)  # fmt: skip


def token_loss(
    rank: int, group: Any, case: Case, config: Any, impl: str, parts: list[slice], how: str, options: dict
) -> dict:
    """The loss with some of the sequences, or some positions of every sequence, on every rank."""
    mine = columns_of(case, parts[rank]) if how == "split" else rows_of(case, parts[rank])
    mine = pack(mine) if how == "packed" else mine
    groups = ParallelGroups(tokens=group, split_sequences=how == "split")
    with counting() as traffic:
        result = mine.run(config, impl=impl, process_group=groups, **options)
    return plain(result, traffic)


def disagreeing(rank: int, group: Any, case: Case, configs: list, changes: list[dict]) -> str:
    """The error on a rank whose call differs from that of the others."""
    mine = of_vocabulary(case, slices([15, 14])[rank])
    for name, value in changes[rank].items():
        setattr(mine, name, value)
    extra = {name: mine.options.pop(name) for name in ("compact",) if name in mine.options}
    try:
        mine.run(configs[rank], process_group=group, **extra)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@torch.no_grad()
def one_bias(rank: int, group: Any, case: Case) -> str:
    """The error where only rank 0 gives a bias."""
    mine, bias = of_vocabulary(case, slices([15, 14])[rank]), torch.zeros(15) if rank == 0 else None
    try:
        fused_linear_logprobs(
            mine.hidden_states, mine.lm_head_weight, mine.completion_ids, lm_head_bias=bias, process_group=group
        )
    except ValueError as error:
        return str(error)
    return "no error"


def summed_in_bf16(rank: int, group: Any) -> bool:
    """Whether sums over four ranks are exact until they are rounded."""
    numbers = torch.randint(-256, 257, (4, 100), generator=torch.Generator().manual_seed(0))
    found = VocabParallel(group, [1] * 4, torch.arange(4)).start_sum(numbers[rank].bfloat16())()
    return torch.equal(found, numbers.sum(0).bfloat16())


def both_in_one_group(rank: int, group: Any) -> str:
    """The error of a grid whose groups have both ranks."""
    try:
        ParallelGroups(vocab=group, tokens=group)
    except ValueError as error:
        return str(error)
    return "no error"


def one_fails(rank: int, group: Any, case: Case, how: str, what: str) -> str:
    """Only rank 1 gets a wrong argument; returns the error of every rank."""
    if how == "grid":  # rank 2 t + v has slice v of the vocabulary and part t of the batch
        from distributed.workers import PAIRS

        v, t = rank % 2, rank // 2
        mine = of_vocabulary(rows_of(case, slice(2 * t, 2 * t + 2)), slices([15, 14])[v])
        given: Any = ParallelGroups(vocab=PAIRS[2 * t, 2 * t + 1], tokens=PAIRS[v, v + 2])
    elif how == "vocab":
        mine, given = of_vocabulary(case, slices([15, 14])[rank]), group
    else:
        mine, given = rows_of(case, slice(2 * rank, 2 * rank + 2)), ParallelGroups(tokens=group)
    options: dict[str, Any] = {}
    if how == "packed" and rank == 0:
        mine = pack(mine)
    if rank == 1 and what == "dtype":  # found by the public function
        mine.completion_ids = mine.completion_ids.float()
    elif rank == 1 and what == "id":  # found by the operator
        mine.completion_ids = torch.where(mine.completion_mask, 29, mine.completion_ids)
    elif rank == 1 and what == "advantage":
        mine.advantages = mine.advantages * torch.nan
    elif rank == 1 and what == "keyword":
        options["compacted"] = True
    elif rank == 1 and what == "states":
        mine.hidden_states = mine.hidden_states * torch.nan
    elif rank == 1 and what == "reading":  # as many tokens as sequences, and one of these is empty
        mine = pack(mine)
        count = len(mine.completion_ids)
        empty = torch.full((count - 2,), count)
        mine.options["cu_seqlens"] = torch.cat([mine.options["cu_seqlens"], empty])
        mine.advantages = torch.ones(count)
    elif what == "items":
        mine.options["num_items_in_batch"] = 3.0 + rank
    elif rank == 1 and what == "scratch":  # found after the handshake
        options["max_scratch_bytes"] = 1
    elif rank == 1 and what == "score":
        options["impl"] = "chunked"
        _fail_once("score", Slab, "logits")
    elif rank == 1 and what == "gradient":
        options["impl"] = "chunked"
        _fail_once("gradient", TorchRows, "gradient")
    elif rank == 1 and what == "metrics":  # after the last collective of the loss
        _fail_once("metrics", pipeline, "compute_metrics")
    elif rank == 1 and what == "hidden size":
        mine.hidden_states, mine.lm_head_weight = mine.hidden_states[..., :8], mine.lm_head_weight[:, :8]
    elif rank == 1 and what == "vocabulary":
        mine.lm_head_weight = torch.cat([mine.lm_head_weight, mine.lm_head_weight[:1]])
    elif rank == 1 and what == "split":
        given = ParallelGroups(tokens=group, split_sequences=True)
    elif what == "sequences":  # rank 1 has a part of one of them only
        mine, given = rows_of(mine, slice(0, 2 - rank)), ParallelGroups(tokens=group, split_sequences=True)
    elif rank == 1 and what == "operator":
        try:
            fused_linear_logprobs(mine.hidden_states, mine.lm_head_weight, mine.completion_ids, process_group=given)
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    try:
        mine.run(GRPOLossConfig(), **{"impl": "chunked", **options}, process_group=given)
    except (RuntimeError, TypeError, ValueError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def logprobs_of_one_fail(rank: int, group: Any, case: Case) -> str:
    """Log-probs do not depend on ranks with other tokens: only rank 1 raises, and does not wait for others."""
    ids = case.completion_ids.float() if rank == 1 else case.completion_ids
    try:
        fused_linear_logprobs(
            case.hidden_states,
            case.lm_head_weight,
            ids,
            case.completion_mask,
            process_group=ParallelGroups(tokens=group),
        )
    except TypeError as error:
        return str(error)
    return "no error"


def _fail_once(what: str, owner: type, name: str) -> None:
    """The next call of a method in this process fails, as if memory were full."""
    original = getattr(owner, name)

    def fails(*_: Any, **__: Any) -> Any:
        setattr(owner, name, original)
        raise MemoryError(f"no room for the {what}")

    setattr(owner, name, fails)


def checkpointed_and_accumulated(rank: int, group: Any, case: Case, sizes: list[int]) -> dict:
    """Two micro-batches through an activation-checkpointed call: dW adds up."""
    from torch.utils.checkpoint import checkpoint

    mine = of_vocabulary(case, slices(sizes)[rank])
    weight = mine.lm_head_weight.detach().requires_grad_()
    for part in (slice(0, 2), slice(2, 4)):
        some = rows_of(mine, part)
        hidden = some.hidden_states.detach().requires_grad_()

        def loss(hidden: torch.Tensor, weight: torch.Tensor, some: Case = some) -> torch.Tensor:
            return fused_linear_grpo_loss(
                hidden, weight, some.completion_ids, some.advantages, some.completion_mask, process_group=group,
                old_per_token_logps=some.options["old_per_token_logps"], num_items_in_batch=7.0,
            ).loss  # fmt: skip

        checkpoint(loss, hidden, weight, use_reentrant=False).backward()
    return {"dweight": weight.grad.double().numpy()}


def sharded(rank: int, group: Any, case: Case, tied: bool) -> dict:
    """FSDP2: a small model whose head (and embedding, if tied) is sharded; gradients as FSDP2 gives them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = small_model(tied)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    some = rows_of(case, slice(2 * rank, 2 * rank + 2))
    model(some).backward()
    return {name: p.grad.full_tensor().double().numpy() for name, p in model.named_parameters()}


def adapted_model(*, lora_bias: bool = True) -> Any:
    """A small Qwen2 with LoRA on the head and in the layers, B not zero."""
    import peft
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=29, hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    lora = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], lora_bias=lora_bias, task_type="CAUSAL_LM")
    model = peft.get_peft_model(Qwen2ForCausalLM(config), lora)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p.data)
    return model


def adapted_under_trl(rank: int, group: Any, token_ids: torch.Tensor, own_group: bool) -> dict:
    """FSDP2 after TRL has patched the model, as its trainers do: log-probs of TRL's forward by our head, gradients of
    their mean; `own_group`: the head is sharded apart from the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from trl.trainer import utils

    from grpo_fused.integrations.trl import use_fused_head

    model, ids = adapted_model(), token_ids[rank]
    with use_fused_head():
        utils.add_fused_lm_head(model.get_base_model())
        mesh = init_device_mesh("cpu", (2,))
        if own_group:
            fully_shard(model.get_output_embeddings(), mesh=mesh)
        fully_shard(model, mesh=mesh)
        logps = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        logps.mean().backward()
    gradients = {n: p.grad.full_tensor().numpy() for n, p in model.named_parameters() if p.requires_grad}
    return {"logps": logps.detach().numpy(), "gradients": gradients}


def merged_of_shards(rank: int, group: Any) -> dict:
    """Weights for vLLM of a policy with adapters that FSDP2 shards; and whether the policy stayed as it was."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from grpo_fused.rollouts.vllm import named_weights

    model = adapted_model(lora_bias=False)  # peft merges none where the layer has no bias
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    before = {name: p.full_tensor() for name, p in model.named_parameters()}
    weights = {name: x.numpy() for name, x in named_weights(model)}
    same = all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())
    return {"weights": weights, "same": same}


def data_parallel(rank: int, group: Any, case: Case, tied: bool) -> dict:
    """DDP on the same."""
    model = torch.nn.parallel.DistributedDataParallel(small_model(tied), process_group=group)
    some = rows_of(case, slice(2 * rank, 2 * rank + 2))
    model(some).backward()
    return {name.removeprefix("module."): p.grad.double().numpy() for name, p in model.named_parameters()}


class SmallModel(torch.nn.Module):
    """Embedding, one layer, and the fused loss of the head on it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(29, 12)
        self.layer = torch.nn.Linear(12, 12)
        self.lm_head = torch.nn.Linear(12, 29, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, case: Case) -> torch.Tensor:
        """The loss of a case; its ids are also the prompt."""
        hidden = self.layer(self.embedding(case.completion_ids)).tanh()
        return fused_linear_grpo_loss(
            hidden, self.lm_head.weight, case.completion_ids, case.advantages.float(), case.completion_mask,
            config=GRPOLossConfig(loss_type="grpo"),
        ).loss  # fmt: skip


def small_model(tied: bool) -> SmallModel:
    """The same on every rank."""
    torch.manual_seed(0)
    return SmallModel(tied)


def sharded_weight(rank: int, group: Any, case: Case) -> dict:
    """A head that is a DTensor when the loss gets it: outside of FSDP's forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(distribute_tensor(case.lm_head_weight, mesh, [Shard(0)]))
    some = rows_of(case, slice(2 * rank, 2 * rank + 2))
    out = fused_linear_grpo_loss(
        some.hidden_states, weight, some.completion_ids, some.advantages, some.completion_mask,
        config=GRPOLossConfig(loss_type="grpo"),
    )  # fmt: skip
    out.loss.backward()
    return {"placements": str(weight.grad.placements), "dweight": weight.grad.full_tensor().double().numpy()}


def grid_loss(
    rank: int, group: Any, case: Case, config: Any, impl: str, rows: list[slice], sizes: list[int], options: dict
) -> dict:
    """Rank 2 t + v has slice v of the vocabulary and part t of the batch."""
    from distributed.workers import PAIRS

    v, t = rank % 2, rank // 2
    mine = of_vocabulary(rows_of(case, rows[rank // 2]), slices(sizes)[rank % 2])
    groups = ParallelGroups(vocab=PAIRS[2 * t, 2 * t + 1], tokens=PAIRS[v, v + 2])
    with counting() as traffic:
        result = mine.run(config, impl=impl, process_group=groups, **options)
    return plain(result, traffic)


def dtensor_among_slices(rank: int, group: Any, case: Case) -> str:
    """A sharded weight where a slice is expected."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(case.lm_head_weight, init_device_mesh("cpu", (2,)), [Shard(0)])
    try:
        fused_linear_logprobs(case.hidden_states, weight, case.completion_ids, process_group=group)
    except ValueError as error:
        return str(error)
    return "no error"


def clipped_objective(logps: torch.Tensor, entropies: torch.Tensor | None, **inputs: torch.Tensor) -> torch.Tensor:
    """PPO's clip, times weights."""
    ratio, advantages = (logps - inputs["old"]).exp(), inputs["advantages"]
    return -inputs["weights"] * torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def custom_loss(rank: int, group: Any, case: Case, impl: str, how: str, parts: list[slice]) -> dict:
    """A custom objective, with slices of the head or some of the sequences on every rank."""
    shape, mask = case.completion_ids.shape, case.completion_mask
    case.options = {
        "old": case.options["old_per_token_logps"], "advantages": case.advantages.view(-1, 1).expand(shape),
        "weights": mask / mask.sum(),
    }  # fmt: skip
    mine = rows_of(case, parts[rank]) if how == "tokens" else of_vocabulary(case, parts[rank])
    inputs = {name: x for name, x in mine.options.items() if x is not None}
    hidden, weight = mine.hidden_states.detach().requires_grad_(), mine.lm_head_weight.detach().requires_grad_()
    out = fused_linear_objective(
        hidden, weight, mine.completion_ids, clipped_objective, mine.completion_mask, inputs=inputs, impl=impl,
        process_group=ParallelGroups(**{how: group}) if group is not None else None,
    )  # fmt: skip
    out.loss.backward()
    arrays = {"loss": out.loss, "dhidden": hidden.grad, "dweight": weight.grad}
    return {name: x.detach().double().numpy() for name, x in arrays.items()}


def other_inputs(rank: int, group: Any, case: Case, name: str | None) -> str:
    """The error of a custom objective whose input differs between ranks with slices of a head; None: a list on one."""
    mine = of_vocabulary(case, slices([15, 14])[rank])
    values = torch.full(mine.completion_ids.shape, float(rank))
    inputs: Any = [values] if name is None and rank else {name or "x": values}
    try:
        fused_linear_objective(
            mine.hidden_states, mine.lm_head_weight, mine.completion_ids,
            lambda logps, entropies, **inputs: logps * inputs[name], mine.completion_mask, inputs=inputs,
            process_group=group,
        )  # fmt: skip
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return "no error"
