"""Rollout corrections equal those of TRL 1.16, whose own code is run, and cases computed by hand."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from helpers import make_case, make_config
from torch.testing import assert_close

from grpo_fused import fused_linear_grpo_loss, importance_sampling_correction

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
DIFFERENCE = "sampling/sampling_logp_difference"
RATIO = "sampling/importance_sampling_ratio"
nan, inf = math.nan, math.inf


def trl_correction(old, sampling, mask, mode, clip_max, clip_min):
    """TRL's own code: the two blocks of its generation step that compute and log the ratio, run alone."""
    module = pytest.importorskip("trl.trainer.grpo_trainer")
    method = module.GRPOTrainer._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    condition = "self.use_vllm and self.vllm_importance_sampling_correction"
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == condition]
    blocks = [b for b in blocks if any(s in ast.unparse(b) for s in ("per_token_logps_diff = ", "_metrics[mode]"))]
    assert len(blocks) == 2
    metrics = defaultdict(list)
    gather = SimpleNamespace(gather=lambda x: x.reshape(-1))
    this = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=clip_max, vllm_importance_sampling_clip_min=clip_min,
        accelerator=gather, _metrics={"train": metrics},
    )  # fmt: skip
    scope = {**vars(module), "self": this, "mode": "train", "device": old.device, "tool_mask": None,
             "old_per_token_logps": old, "sampling_per_token_logps": sampling, "completion_mask": mask.long()}  # fmt: skip
    blocks.sort(key=lambda node: node.lineno)
    exec(compile(ast.Module(body=blocks, type_ignores=[]), "trl", "exec"), scope)
    return scope["vllm_importance_sampling_ratio"], {name: value[0] for name, value in metrics.items()}


def rollout(seed=0, B=5, T=9, drift=0.4):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(B, T, generator=g) * 4
    sampling = old + drift * torch.randn(B, T, generator=g)
    mask = torch.rand(B, T, generator=g) > 0.3
    mask[1] = False
    return old, sampling, mask


@pytest.mark.parametrize("nans", [False, True], ids=["all-scored", "some-nan"])
@pytest.mark.parametrize("bounds", [(3.0, None), (1.2, 0.8), (None, 0.7)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_trl(mode, bounds, nans):
    clip_max, clip_min = bounds
    old, sampling, mask = rollout()
    if nans:
        sampling[0, :3] = sampling[2] = nan
    want, want_metrics = trl_correction(old, sampling, mask, mode, clip_max, clip_min)
    got = importance_sampling_correction(old, sampling, mask, mode=mode, clip_max=clip_max, clip_min=clip_min)
    assert got.ratio.shape == want.shape
    assert got.ratio.dtype == torch.float32
    assert len(want.unique()) > 2
    assert_close(got.ratio, want, rtol=1e-5, atol=1e-7)
    assert got.metrics.keys() == want_metrics.keys()
    for name, value in want_metrics.items():
        assert float(got.metrics[name]) == pytest.approx(value, rel=1e-5), name


def test_trl_defaults():
    config = pytest.importorskip("trl").GRPOConfig.__dataclass_fields__
    ours = inspect.signature(importance_sampling_correction).parameters
    for name in ("mode", "clip_max", "clip_min"):
        assert ours[name].default == config[f"vllm_importance_sampling_{name}"].default


# old - sampling = log 2, log 4, (masked) | log 1/2, log 1/4, unknown: ratios 2, 4 and 1/2, 1/4, 1; products 8 and 1/8
OLD = torch.tensor([[2.0, 4.0, 1.0], [0.5, 0.25, 0.9]]).log() - 5
SAMPLING = torch.tensor([[-5.0, -5.0, nan], [-5.0, -5.0, nan]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("mode", "clip_max", "clip_min", "want"),
    [
        ("token_truncate", 3.0, None, [[2.0, 3.0, 1.0], [0.5, 0.25, 1.0]]),
        ("token_truncate", None, 0.4, [[2.0, 4.0, 1.0], [0.5, 0.4, 1.0]]),
        ("token_mask", 3.0, 0.4, [[2.0, 0.0, 1.0], [0.5, 0.0, 1.0]]),
        ("sequence_truncate", 3.0, 0.2, [[3.0], [0.2]]),
        ("sequence_mask", 3.0, None, [[0.0], [0.125]]),
        ("sequence_mask", None, None, [[8.0], [0.125]]),
    ],
)
def test_by_hand(mode, clip_max, clip_min, want):
    got = importance_sampling_correction(OLD, SAMPLING, MASK, mode=mode, clip_max=clip_max, clip_min=clip_min)
    want = torch.tensor(want)
    assert_close(got.ratio, want)
    counted = want if mode.startswith("sequence") else want[MASK.bool()]
    log2 = math.log(2)
    expected = {f"{DIFFERENCE}/mean": 6 * log2 / 4, f"{DIFFERENCE}/max": 2 * log2, f"{RATIO}/min": counted.min().item(),
                f"{RATIO}/mean": counted.mean().item(), f"{RATIO}/max": counted.max().item()}  # fmt: skip
    assert {name: pytest.approx(float(value)) for name, value in got.metrics.items()} == expected


@pytest.mark.parametrize("bound", ["clip_min", "clip_max"])
@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_a_ratio_at_its_bound_is_kept(mode, bound):
    old = torch.full((2, 3), -2.0)
    assert importance_sampling_correction(old, old, mode=mode, **{"clip_max": None, bound: 1.0}).ratio.eq(1).all()


@pytest.mark.parametrize("mode", MODES)
def test_packed_is_padded(mode):
    old, sampling, mask = rollout(3)
    sampling[0, 0] = nan
    keep = mask.clone()
    keep[::2] = True  # masked tokens inside a packed sequence, and a sequence without any
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)])
    padded = importance_sampling_correction(old, sampling, mask, mode=mode, clip_max=1.5)
    packed = importance_sampling_correction(
        old[keep], sampling[keep], mask[keep], mode=mode, clip_max=1.5, cu_seqlens=offsets.int()
    )
    assert_close(packed.ratio, padded.ratio if mode.startswith("sequence") else padded.ratio[keep])
    assert packed.metrics.keys() == padded.metrics.keys()
    for name, value in padded.metrics.items():
        assert_close(packed.metrics[name], value)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_the_loss_takes_the_ratio(mode, packed):
    case = make_case(2)
    old = case.options["old_per_token_logps"]
    sampling = case.options.pop("sampling_per_token_logps")
    mask, offsets, hidden, ids = case.completion_mask, None, case.hidden_states, case.completion_ids
    if packed:
        B, T = ids.shape
        offsets = torch.arange(B + 1) * T
        old, sampling, mask, hidden, ids = (x.flatten(0, 1) for x in (old, sampling, mask, hidden, ids))
    ratio = importance_sampling_correction(old, sampling, mask, mode=mode, cu_seqlens=offsets).ratio
    out = fused_linear_grpo_loss(
        hidden, case.lm_head_weight, ids, case.advantages, mask, old_per_token_logps=old,
        importance_sampling_ratio=ratio, cu_seqlens=offsets, config=make_config("dapo"),
    )  # fmt: skip
    r = (out.per_token_logps - old).exp()
    A = case.advantages.repeat_interleave(7).view_as(r)
    scale = ratio.repeat_interleave(7).view_as(r) if ratio.shape != r.shape else ratio
    loss = -torch.minimum(r * A, r.clamp(0.8, 1.2) * A) * scale * mask
    assert_close(out.loss, loss.sum() / mask.sum(), rtol=1e-6, atol=1e-8)


def test_long_sequences_stay_finite():
    """Where TRL's exponential overflows: e^20 at most, with the same decisions as without the clamp."""
    old, sampling = torch.zeros(2, 1000), torch.full((2, 1000), -0.5)
    sampling[1] = 0.5
    for mode, clip_max, want in (
        ("sequence_mask", 3.0, [0.0, 0.0]), ("sequence_truncate", 3.0, [3.0, 0.0]),
        ("sequence_mask", None, [math.exp(20), 0.0]),
    ):  # fmt: skip
        got = importance_sampling_correction(old, sampling, mode=mode, clip_max=clip_max)
        assert_close(got.ratio[:, 0], torch.tensor(want))


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_one_of_both_finds_impossible(mode):
    old, sampling = torch.tensor([[-torch.inf, -1.0, -1.0]]), torch.tensor([[-1.0, -torch.inf, -1.0]])
    got = importance_sampling_correction(old, sampling, mode=mode)
    assert got.ratio.isfinite().all()
    assert all(x.isfinite().all() for x in got.metrics.values())


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_and_empty_sequences_have_no_effect(mode):
    old, sampling, mask = rollout(4)
    want = importance_sampling_correction(old, sampling, mask, mode=mode)
    old[~mask], sampling[~mask] = nan, inf
    got = importance_sampling_correction(old, sampling, mask, mode=mode)
    assert torch.equal(got.ratio, want.ratio)
    assert got.metrics == want.metrics
    for shape in ((0, 3), (2, 0)):
        empty = importance_sampling_correction(torch.zeros(shape), torch.zeros(shape), mode=mode)
        assert empty.ratio.shape == ((shape[0], 1) if mode.startswith("sequence") else shape)
        assert float(empty.metrics[f"{DIFFERENCE}/max"]) == 0.0
        assert float(empty.metrics[f"{DIFFERENCE}/mean"]) == 0.0
    none = importance_sampling_correction(old, sampling, torch.zeros_like(mask), mode=mode)
    assert float(none.metrics[f"{RATIO}/min"]) == (1.0 if mode.startswith("sequence") else 0.0)


def test_dtypes_and_gradients():
    old, sampling, mask = rollout(5)
    assert importance_sampling_correction(old.double(), sampling, mask).ratio.dtype == torch.float64
    assert importance_sampling_correction(old, sampling.double(), mask).ratio.dtype == torch.float64
    got = importance_sampling_correction(old.bfloat16().requires_grad_(), sampling.bfloat16(), mask)
    assert got.ratio.dtype == torch.float32
    assert not got.ratio.requires_grad


BAD = {
    "mode": (ValueError, "mode must be one of token_truncate", {"mode": "token"}),
    "no-bound": (ValueError, "needs clip_min or clip_max", {"mode": "token_truncate", "clip_max": None}),
    "order": (ValueError, "clip_min must be >= 0 and below clip_max; got 3.0 and 3.0", {"clip_min": 3.0}),
    "clip_max": (ValueError, "clip_max must be > 0", {"clip_max": 0.0}),
    "clip_min": (ValueError, "clip_min must be >= 0", {"clip_min": -1.0}),
    "clip_max-type": (TypeError, "clip_max must be a number", {"clip_max": "3"}),
    "sampling-shape": (ValueError, r"sampling_per_token_logps must have shape \(2, 3\)", {"sampling_per_token_logps": OLD[:1]}),
    "sampling-none": (TypeError, "sampling_per_token_logps must be a torch.Tensor; got NoneType", {"sampling_per_token_logps": None}),
    "mask-shape": (ValueError, "mask must have shape", {"mask": MASK[:, :2]}),
    "mask-values": (ValueError, "only 0 and 1", {"mask": MASK * 2}),
    "sampling-infinite": (ValueError, r"sampling_per_token_logps must not be \+inf on active tokens; got others at 1",
                          {"sampling_per_token_logps": torch.tensor([[-1.0, inf, inf], [-1.0, -1.0, -1.0]])}),
    "old-nan": (ValueError, "old_per_token_logps must not be NaN", {"old_per_token_logps": SAMPLING}),
    "old-dtype": (TypeError, "old_per_token_logps must be fp16", {"old_per_token_logps": MASK}),
    "unpacked": (ValueError, "packed", {"cu_seqlens": torch.tensor([0, 6])}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    error, message, changed = BAD[name]
    arguments = {"old_per_token_logps": OLD, "sampling_per_token_logps": SAMPLING, "mask": MASK, **changed}
    with pytest.raises(error, match=message):
        importance_sampling_correction(**arguments)


def test_wrong_offsets():
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of tokens, 6; got"):
        importance_sampling_correction(OLD.flatten(), SAMPLING.flatten(), cu_seqlens=torch.tensor([0, 4]))
