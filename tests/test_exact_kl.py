"""`kl_estimator="exact"`: the loss with the KL over the whole vocabulary, in one pass of four products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import frobenius_error, make_case, make_config
from recording import CostRecorder

from grpo_fused import CandidateSets, fused_linear_grpo_loss, grpo_loss
from grpo_fused.api.operators import linear_grpo_loss
from grpo_fused.call.calls import LMHead, LossCall, LossInputs, Needs, Run, TokenSets
from grpo_fused.testing import ROUNDINGS, rounding_errors

BETA = 0.3
OBJECTIVES = {
    "dapo": {},
    "grpo-bonus": {"loss_type": "grpo", "entropy_coef": 0.02},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "bnpo-sequence-token": {"loss_type": "bnpo", "importance_sampling_level": "sequence_token"},
    "dr-grpo": {"loss_type": "dr_grpo"},
    "luspo": {"loss_type": "luspo"},
    "cispo": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "gmpo": {"loss_type": "gmpo"},
    "quantile": {"top_entropy_quantile": 0.4},
}
objectives = pytest.mark.parametrize("options", OBJECTIVES.values(), ids=OBJECTIVES)


class Pair:
    """A case and a reference near its policy."""

    def __init__(self, seed=0, dtype=torch.float64, near=0.3, **sizes):
        self.case = make_case(seed, dtype=dtype, **sizes)
        g = torch.Generator().manual_seed(seed + 100)
        hidden, weight = self.case.hidden_states.detach(), self.case.lm_head_weight.detach()
        noise = torch.randn(hidden.shape, generator=g, dtype=torch.float64).to(dtype)
        self.reference = {"ref_hidden_states": hidden + near * noise, "ref_lm_head_weight": weight.clone()}
        self.inputs = {
            "completion_ids": self.case.completion_ids,
            "advantages": self.case.advantages,
            "completion_mask": self.case.completion_mask,
            "old_per_token_logps": self.case.options["old_per_token_logps"],
        }

    def run(self, config, *, need=(True, True), cast=None, **options):
        """(result, dhidden, dweight)"""
        hidden, weight = (x.detach().clone() for x in (self.case.hidden_states, self.case.lm_head_weight))
        reference = self.reference
        if cast is not None:
            hidden, weight = hidden.to(cast), weight.to(cast)
            reference = {name: x.to(cast) for name, x in reference.items()}
        hidden.requires_grad_(need[0])
        weight.requires_grad_(need[1])
        out = fused_linear_grpo_loss(hidden, weight, **{**self.inputs, **reference, **options}, config=config)
        if out.loss.requires_grad:
            out.loss.backward()
        return out, hidden.grad, weight.grad


def config_of(options, beta=BETA):
    return make_config(**{"loss_type": "dapo", **options}, beta=beta, kl_estimator="exact")


def shares(config, mask):
    """[B, T]: each token's share in the loss, by the definition of the loss type."""
    mask = mask.double()
    lengths, sequences = mask.sum(1, keepdim=True).clamp(min=1), len(mask)
    share = {
        "grpo": 1.0 / (lengths * sequences), "sapo": 1.0 / (lengths * sequences), "gmpo": 1.0 / (lengths * sequences),
        "dr_grpo": 1.0 / (sequences * (config.max_completion_length or 1)),
        "luspo": 1.0 / sequences,
    }.get(config.loss_type, 1.0 / mask.sum())  # fmt: skip
    return share * mask


def naive(pair, config, *, temperature=1.0, scale=1.0, softcap=None):
    """By log-softmax and autograd of all logits; the policy's term by `grpo_loss`."""
    case = pair.case
    hidden, weight = (x.detach().clone().requires_grad_() for x in (case.hidden_states, case.lm_head_weight))

    def log_probs(h, w):
        z = (h @ w.T) * scale
        return ((z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature).log_softmax(-1)

    log_p, log_q = log_probs(hidden, weight), log_probs(*pair.reference.values())
    ids = torch.where(case.completion_mask, case.completion_ids, 0).unsqueeze(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    plain = replace(config, beta=0.0, kl_estimator="k3")
    policy = grpo_loss(
        log_p.gather(-1, ids).squeeze(-1), case.advantages, case.completion_mask, entropies=entropies,
        old_per_token_logps=pair.inputs["old_per_token_logps"], config=plain, impl="reference",
    )  # fmt: skip
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = policy.loss + config.beta * (shares(config, case.completion_mask) * kl).sum()
    loss.backward()
    mean = (kl * case.completion_mask).sum() / case.completion_mask.sum()
    return loss.detach(), mean.detach(), hidden.grad, weight.grad


@objectives
@pytest.mark.parametrize("how", [
    {"impl": "chunked"}, {"impl": "chunked", "max_scratch_bytes": 150_000}, {"impl": "chunked", "compact": False},
    {"impl": "reference"}, {"impl": "chunked", "max_scratch_bytes": 40_000, "need": (True, False)},
], ids=["chunked", "small-chunks", "not-compact", "reference", "frozen"])  # fmt: skip
def test_equals_the_definition_in_float64(options, how):
    config = config_of(options)
    for seed, transform in ((1, {}), (2, {"temperature": 0.7, "scale": 0.9, "softcap": 5.0})):
        pair = Pair(seed, B=5, T=9, H=12, V=97)
        loss, mean, dhidden, dweight = naive(pair, config, **transform)
        given = {"logit_scale" if name == "scale" else name: x for name, x in transform.items()}
        out, *got = pair.run(config, **how, **given)
        torch.testing.assert_close(out.loss, loss, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(out.metrics["kl"].double(), mean, rtol=1e-6, atol=1e-9)
        assert frobenius_error(got[0], dhidden) <= 1e-10
        if how.get("need") != (True, False):
            assert frobenius_error(got[1], dweight) <= 1e-10


@pytest.mark.gate(keep=lambda seed: seed < 15)
@pytest.mark.parametrize("seed", range(300))
def test_random_cases_in_float64(seed):
    """Objective, sizes, distance of the reference, transform, chunks."""
    g = torch.Generator().manual_seed(5000 + seed)

    def drawn(*values):
        return values[int(torch.randint(len(values), (), generator=g))]

    config = config_of(drawn(*OBJECTIVES.values()), beta=drawn(0.01, 0.3, 3.0))
    pair = Pair(
        seed, near=drawn(0.01, 0.3, 2.0), B=drawn(1, 3, 6), T=drawn(1, 5, 12), H=drawn(1, 8, 17), V=drawn(2, 60)
    )
    transform = {"temperature": drawn(1.0, 0.6), "scale": drawn(1.0, 1.3), "softcap": drawn(None, 4.0)}
    loss, mean, dhidden, dweight = naive(pair, config, **transform)
    transform["logit_scale"] = transform.pop("scale")
    how = {"compact": drawn(True, False), "max_scratch_bytes": drawn(None, 60_000)}
    out, *got = pair.run(config, impl=drawn("chunked", "reference"), **transform, **how)
    torch.testing.assert_close(out.loss, loss, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(out.metrics["kl"].double(), mean, rtol=1e-6, atol=1e-9)
    for mine, want in zip(got, (dhidden, dweight), strict=True):
        assert frobenius_error(mine, want) <= 1e-9 or (mine - want).norm() <= 1e-12


@objectives
def test_packed_is_padded(options):
    config, pair = config_of(options), Pair(3, B=4, T=8, H=12, V=50)
    want, dhidden, dweight = pair.run(config)
    mask = pair.case.completion_mask
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
    packed = {name: x[mask] for name, x in pair.inputs.items() if name not in ("advantages", "completion_mask")}
    hidden = pair.case.hidden_states.detach()[mask].clone().requires_grad_()
    weight = pair.case.lm_head_weight.detach().clone().requires_grad_()
    got = fused_linear_grpo_loss(
        hidden, weight, **packed, advantages=pair.inputs["advantages"].reshape(-1, 1), cu_seqlens=offsets,
        ref_hidden_states=pair.reference["ref_hidden_states"][mask],
        ref_lm_head_weight=pair.reference["ref_lm_head_weight"], config=config,
    )  # fmt: skip
    got.loss.backward()
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(hidden.grad, dhidden[mask])
    torch.testing.assert_close(weight.grad, dweight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(dtype):
    """Gradients within two roundings of dlogits, as without the KL."""
    config = config_of({"loss_type": "luspo"})  # its gradients are normal numbers of fp16
    pair = Pair(4, B=4, T=12, H=32, V=400)
    pair.case = pair.case.to(dtype).to(torch.float64)
    pair.reference = {name: x.to(dtype).double() for name, x in pair.reference.items()}
    loss, mean, dhidden, dweight = naive(pair, config)
    out, *got = pair.run(config, cast=dtype)
    torch.testing.assert_close(out.loss.double(), loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.metrics["kl"].double(), mean, rtol=1e-4, atol=1e-6)
    bounds = {"dhidden": 2e-5, "dweight": 2e-5}
    if dtype != torch.float32:
        hidden, weight = pair.case.hidden_states.flatten(0, 1), pair.case.lm_head_weight
        # with the identity for a head, dH is dlogits
        logits = Pair(4, B=4, T=12, H=32, V=400)
        logits.case = replace(
            pair.case, hidden_states=pair.case.hidden_states @ weight.T, lm_head_weight=torch.eye(400).double()
        )
        products = pair.reference["ref_hidden_states"] @ pair.reference["ref_lm_head_weight"].T
        logits.reference = {"ref_hidden_states": products, "ref_lm_head_weight": torch.eye(400).double()}
        dlogits = naive(logits, config)[2].flatten(0, 1)
        bounds = {name: ROUNDINGS * x for name, x in rounding_errors(dlogits, hidden, weight, dtype).items()}
    assert frobenius_error(got[0], dhidden) <= bounds["dhidden"]
    assert frobenius_error(got[1], dweight) <= bounds["dweight"]


@pytest.mark.parametrize("name", ["dapo", "grpo-bonus"])
def test_equals_the_definition_in_fp32(name):
    """Here the row work is in C++, except with an entropy bonus."""
    config, pair = config_of(OBJECTIVES[name]), Pair(16, B=4, T=8, H=16, V=200)
    loss, _, *want = naive(pair, config)
    out, *got = pair.run(config, cast=torch.float32)
    torch.testing.assert_close(out.loss.double(), loss, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(got, want, strict=True):
        assert frobenius_error(mine, theirs) <= 2e-5


@pytest.mark.parametrize(("beta", "advantage"), [(BETA, 0.0), (1e-9, 1.0)], ids=["kl", "policy"])
def test_fp16_gradients_of_one_term_alone(beta, advantage, monkeypatch):
    """In products of fp16, as on a GPU: their scale must allow for both terms."""
    monkeypatch.setattr("grpo_fused.engines.products.has_products_in", lambda dtype, device: True)
    config, pair = config_of({"loss_type": "luspo"}, beta=beta), Pair(17, B=4, T=8, H=16, V=200)
    pair.case = replace(pair.case, advantages=torch.full_like(pair.case.advantages, advantage))
    pair.inputs["advantages"] = pair.case.advantages
    want = naive(pair, config)[2:]
    for mine, theirs in zip(pair.run(config, cast=torch.float16)[1:], want, strict=True):
        assert frobenius_error(mine, theirs) <= 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_policy_as_its_own_reference(dtype):
    """KL exactly 0, and the gradient that of the policy's term."""
    pair = Pair(5, dtype=dtype, near=0.0, B=4, T=8, H=16, V=300)
    out, *got = pair.run(config_of({}))
    none = dict.fromkeys(pair.reference)
    plain, *want = pair.run(make_config("dapo"), impl="chunked", **none)
    assert out.metrics["kl"] == 0
    torch.testing.assert_close(out.loss, plain.loss, rtol=1e-6, atol=1e-7)
    for mine, theirs in zip(got, want, strict=True):
        assert frobenius_error(mine, theirs) <= 1e-6


def test_beta_zero_is_a_metric_only():
    pair = Pair(6, B=4, T=8, H=16, V=60)
    out, *got = pair.run(config_of({}, beta=0.0))
    plain, *want = pair.run(make_config("dapo"), impl="chunked", **dict.fromkeys(pair.reference))
    kl = naive(pair, config_of({}))[1]
    torch.testing.assert_close(out.metrics["kl"].double(), kl, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(out.loss, plain.loss)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
    lean = pair.run(config_of({}), with_metrics=False)
    torch.testing.assert_close(lean[1], pair.run(config_of({}))[1])
    assert "kl" not in lean[0].metrics


@pytest.mark.parametrize(("need", "products"), [((True, True), 4), ((True, False), 3), ((False, False), 2)], ids=str)
@pytest.mark.parametrize(("options", "extra"), [({}, 0), ({"top_entropy_quantile": 0.5}, 2)], ids=["token", "batch"])
def test_products(need, products, options, extra):
    """One more than the loss without it; scoring first costs one of each head."""
    B, T, H, V = 4, 16, 16, 800
    case = make_case(7, dtype=torch.float32, B=B, T=T, H=H, V=V)
    hidden, weight, ids, config = case.hidden_states, case.lm_head_weight, case.completion_ids, config_of(options)
    call = LossCall(
        hidden, LMHead(weight), ids, LossInputs(case.advantages), None, TokenSets(), config.encoded, True,
        Needs(*need, False), Run("chunked"), hidden + 0.1, LMHead(weight),
    )  # fmt: skip
    with torch.no_grad(), CostRecorder() as recorded:
        linear_grpo_loss.body(call)
    assert recorded.products(B * T, H, V) == products + (extra if any(need) else 0)


def test_two_runs_are_bitwise_equal():
    pair = Pair(8, dtype=torch.bfloat16, B=4, T=8, H=16, V=300)
    first, second = (pair.run(config_of({})) for _ in range(2))
    assert first[0].loss == second[0].loss
    assert all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))


def test_bias():
    """Both heads have one."""
    pair = Pair(9, B=3, T=6, H=12, V=40)
    bias = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for impl in ("chunked", "reference"):
        own = bias.clone().requires_grad_()
        out, *got = pair.run(config_of({}), lm_head_bias=own, ref_lm_head_bias=bias.flip(0), impl=impl)
        results.append((out.loss, own.grad, *got))
    for mine, want in zip(*results, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="both have a bias or none; got no ref_lm_head_bias"):
        pair.run(config_of({}), lm_head_bias=bias)


@pytest.mark.parametrize("compact", [True, False])
def test_masked_positions_may_have_any_values(compact):
    pair = Pair(10, B=4, T=8, H=16, V=60)
    want = pair.run(config_of({}), compact=compact)
    hidden = pair.case.hidden_states.detach().clone()
    for x in (hidden, pair.reference["ref_hidden_states"]):
        x[~pair.case.completion_mask] = float("nan")
    pair.case = replace(pair.case, hidden_states=hidden)
    got = pair.run(config_of({}), compact=compact)
    torch.testing.assert_close(got[0].loss, want[0].loss)
    torch.testing.assert_close(got[1], want[1])
    torch.testing.assert_close(got[2], want[2])


def test_torch_compile_of_a_caller():
    pair = Pair(11, dtype=torch.float32, B=2, T=6, H=16, V=60)
    config = config_of({})

    def loss(hidden, weight):
        return fused_linear_grpo_loss(hidden * 1.0, weight, **pair.inputs, **pair.reference, config=config).loss

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().clone().requires_grad_() for x in (pair.case.hidden_states, pair.case.lm_head_weight)]
        function(*leaves).backward()
        results.append([x.grad for x in leaves])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_no_gradient_reaches_the_reference():
    pair = Pair(12, dtype=torch.float32, B=2, T=6, H=16, V=60)
    leaves = {name: x.requires_grad_() for name, x in pair.reference.items()}
    pair.run(config_of({}))
    assert all(x.grad is None for x in leaves.values())


@pytest.mark.parametrize(("options", "message"), [
    ({"ref_lm_head_weight": None}, "needs ref_hidden_states and ref_lm_head_weight; got ref_hidden_states"),
    ({"ref_hidden_states": None, "ref_lm_head_weight": None}, "needs ref_hidden_states and ref_lm_head_weight; got none"),
    ({"ref_per_token_logps": torch.zeros(4, 8)}, "does not support ref_per_token_logps"),
    ({"impl": "triton"}, "'chunked' or 'reference'; got 'triton'"),
    ({"ref_lm_head_weight": torch.zeros(61, 16)}, "same vocabulary; got 60 and 61 rows"),
    ({"ref_hidden_states": torch.zeros(4, 7, 16)}, "reference: hidden_states"),
    ({"config": make_config("dapo", beta=0.1), "ref_per_token_logps": torch.zeros(4, 8)}, "'exact' only; got 'k3'"),
], ids=lambda x: x if isinstance(x, str) else None)  # fmt: skip
def test_bad_calls(options, message):
    pair = Pair(13, dtype=torch.float32, B=4, T=8, H=16, V=60)
    given = dict(options)
    config = given.pop("config", config_of({}))
    with pytest.raises(ValueError, match=message):
        pair.run(config, **given)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_a_token_that_the_reference_excludes_is_an_error(impl):
    pair = Pair(15, dtype=torch.float32, B=4, T=8, H=16, V=60)
    excluded = torch.zeros(60).index_fill(0, torch.tensor([7]), -torch.inf)
    with pytest.raises(ValueError, match="tokens whose exact KL is inf or NaN"):
        pair.run(config_of({}), lm_head_bias=torch.zeros(60), ref_lm_head_bias=excluded, impl=impl)


def test_candidates_are_refused():
    pair = Pair(14, dtype=torch.float32, B=4, T=8, H=16, V=60)
    sets = CandidateSets.from_mask(torch.ones(4, 8, 60, dtype=torch.bool))
    with pytest.raises(ValueError, match="does not support candidates"):
        pair.run(config_of({}), candidates=sets)


def test_other_functions_say_that_they_have_no_heads():
    with pytest.raises(ValueError, match="kl_estimator='exact' needs hidden states and head"):
        grpo_loss(torch.zeros(2, 3), torch.zeros(2), config=config_of({}))


def test_a_sharded_reference_is_gathered():
    """A weight as FSDP2 holds it."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    pair = Pair(15, dtype=torch.float32, B=2, T=6, H=16, V=60)
    want = pair.run(config_of({}))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = pair.reference["ref_lm_head_weight"]
        pair.reference["ref_lm_head_weight"] = DTensor.from_local(weight, init_device_mesh("cpu", (1,)), [Shard(0)])
        got = pair.run(config_of({}))
    finally:
        dist.destroy_process_group()
    for mine, theirs in zip((got[0].loss, *got[1:]), (want[0].loss, *want[1:]), strict=True):
        torch.testing.assert_close(mine, theirs)
