"""The cost of a call, compared with the documentation: head products, operators, bytes. Counted, not timed.

Compiled kernels' registers and shared memory are guarded in tests/kernels/test_aot.py.
"""

from __future__ import annotations

import bisect
import traceback
from dataclasses import replace

import pytest
import torch
from helpers import config_id, make_case, make_config
from recording import CostRecorder
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_fused import engines
from grpo_fused.api.pipeline import run_logprobs, run_loss, sequence_chunks
from grpo_fused.call.calls import HIDDEN_ALONE, LMHead, LogprobsCall, LossCall, LossInputs, Needs, Run, TokenSets
from grpo_fused.engines import chunked, cpu_library, native
from grpo_fused.engines.base import MANY, Tokens, even_chunks
from grpo_fused.engines.chunked import ChunkedEngine
from grpo_fused.engines.gradients import GradientSums
from grpo_fused.engines.scratch import DEFAULT_SCRATCH_BYTES
from grpo_fused.tools.predictions import Shape

B, T, H, V = 8, 32, 24, 640
N = B * T
ALL = Needs(need_hidden=True, need_weight=True, need_bias=False)
LIBRARY = ["chunked", "native"]


def dense(dtype=torch.float32, **options):
    """A case in which every token has a gradient: nothing is masked, no ratio is clipped."""
    case = make_case(0, **{"B": B, "T": T, "H": H, "V": V, "dtype": dtype, "masked": 0.0, "drift": 0.02, **options})
    if "masked" not in options:
        case.completion_mask[:] = True  # no empty sequence either
    return case


def prepared(case, scratch=None, compact=True):
    """The head of a case, how its call runs, and its positions."""
    weight = case.lm_head_weight
    dtype = torch.promote_types(case.hidden_states.dtype, weight.dtype)
    head, run = LMHead(weight, compute_dtype=dtype), Run("", scratch, compact)
    ids, mask = case.completion_ids, case.completion_mask
    call = LogprobsCall(case.hidden_states, head, ids, mask, TokenSets(), False, run)
    return head, run, Tokens.of(call)


def count(case, impl, config, *, needs=ALL, scratch=None, compact=True, with_metrics=True):
    """The recorder of a loss call, and its result."""
    head, run, tokens = prepared(case, scratch, compact)
    options = dict(case.options)
    if config.beta == 0.0:
        options.pop("ref_per_token_logps")
    if config.off_policy_mask_threshold is None:
        options.pop("sampling_per_token_logps")
    inputs = LossInputs(case.advantages, case.completion_mask, **options)
    call = LossCall(
        case.hidden_states, head, case.completion_ids, inputs, None, TokenSets(), config.encoded, with_metrics, needs,
        run,
    )  # fmt: skip
    with torch.no_grad(), CostRecorder() as recorded:
        result = run_loss(engines.engine(impl), tokens, call)
    return recorded, result


def small_chunks(case, rows):
    """A budget that holds logits of `rows` tokens or some more, of fewer than twice as many."""
    head = prepared(case)[0]
    engine, budget = engines.engine("chunked"), 2**14
    while True:
        try:
            if engine.chunk_rows(head, MANY, budget) >= rows:
                return budget
        except ValueError:
            pass
        budget += 2**12


TOKEN = [make_config(t) for t in ("dapo", "grpo", "cispo", "sapo")] + [make_config("dapo", beta=0.1, entropy_coef=0.01)]
SEQUENCE = [make_config("grpo", importance_sampling_level="sequence"), make_config("vespo"), make_config("gmpo"),
            make_config("dapo", importance_sampling_level="sequence_token"),
            make_config("dapo", off_policy_mask_threshold=5.0)]  # fmt: skip
BATCH = [make_config("dapo", top_entropy_quantile=0.5, beta=0.1)]


@pytest.mark.parametrize("impl", LIBRARY)
@pytest.mark.parametrize("config", TOKEN + SEQUENCE, ids=config_id)
def test_three_products_for_every_objective_that_fits(impl, config):
    """Token level always; sequence level if a sequence fits a chunk."""
    recorded, result = count(dense(), impl, config)
    assert result.gradients.tokens == N
    assert recorded.products(N, H, V) == 3


@pytest.mark.gate(keep=lambda config: config in (SEQUENCE[0], SEQUENCE[-1]))
@pytest.mark.parametrize("config", SEQUENCE, ids=config_id)
def test_one_more_product_if_a_sequence_does_not_fit(config):
    """Except in native, which keeps exponentials instead, and with a frozen head: then dlogp/dh is made at once."""
    case = dense(B=2)
    scratch = small_chunks(case, T // 4)
    assert engines.engine("chunked").chunk_rows(prepared(case)[0], MANY, scratch) < T
    assert count(case, "chunked", config, scratch=scratch)[0].products(2 * T, H, V) == 4
    assert count(case, "chunked", TOKEN[0], scratch=scratch)[0].products(2 * T, H, V) == 3
    for entropy_coef, products in ((0.0, 2), (0.01, 3)):
        chosen = replace(config, entropy_coef=entropy_coef)
        frozen, _ = count(case, "chunked", chosen, scratch=scratch, needs=HIDDEN_ALONE)
        assert frozen.products(2 * T, H, V) == products


def test_a_chunk_is_as_many_whole_sequences_as_fit():
    assert sequence_chunks([3, 5, 8, 0, 1], 8) == (slice(0, 8), slice(8, 16), slice(16, 17))
    assert sequence_chunks([3, 9], 8) is None


@pytest.mark.parametrize("impl", LIBRARY)
@pytest.mark.parametrize("config", BATCH, ids=config_id)
def test_one_more_product_if_the_batch_must_be_scored_first(impl, config):
    assert count(dense(), impl, config)[0].products(N, H, V) == 4
    assert count(dense(), impl, config, needs=HIDDEN_ALONE)[0].products(N, H, V) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", LIBRARY)
def test_products_do_not_depend_on_the_dtype(impl, dtype):
    """Blocks that are converted are multiplied once."""
    case = dense(dtype, V=3001)
    assert count(case, impl, TOKEN[0])[0].products(N, H, 3001) == 3


@pytest.mark.parametrize("impl", LIBRARY)
def test_gradients_that_are_not_needed_are_not_computed(impl):
    case = dense()
    frozen_head, frozen_body, nothing = Needs(True, False, False), Needs(False, True, False), Needs(False, False, False)
    sampled = -(-V // native.SAMPLE) / V if impl == "native" else 0
    for needs, products in ((frozen_head, 2 + sampled), (frozen_body, 2), (nothing, 1)):
        assert count(case, impl, TOKEN[0], needs=needs)[0].products(N, H, V) == products


@pytest.mark.parametrize("impl", LIBRARY)
def test_scoring_is_one_product(impl):
    """One more makes dlogp/dh, in the same pass."""
    case = dense()
    head, run, tokens = prepared(case)
    call = LogprobsCall(case.hidden_states, head, case.completion_ids, None, TokenSets(), True, run)
    sampled = -(-V // native.SAMPLE) / V if impl == "native" else 0
    for with_dhidden, products in ((False, 1), (True, 2 + sampled)):
        with torch.no_grad(), CostRecorder() as recorded:
            run_logprobs(engines.engine(impl), tokens, call._replace(with_dhidden=with_dhidden))
        assert recorded.products(N, H, V) == products


def test_reference_holds_all_logits():
    """Three products too, and all logits, which the package avoids."""
    case = dense()
    with CostRecorder() as recorded:
        case.run(TOKEN[0], impl="reference")
    assert recorded.products(N, H, V) == 3
    assert recorded.peak >= 3 * N * V * 4


@pytest.mark.parametrize("impl", LIBRARY)
def test_masked_tokens_cost_nothing(impl):
    case = dense(masked=0.6)
    active = int(case.completion_mask.sum())
    assert 0 < active < N // 2
    assert count(case, impl, TOKEN[0])[0].products(active, H, V) == 3
    case.completion_mask[:] = False
    assert count(case, impl, TOKEN[0])[0].flop == 0


@pytest.mark.parametrize("impl", LIBRARY)
def test_zero_advantages_cost_no_gradient(impl):
    """Their rows are scored for the metrics, without metrics not at all; with a KL penalty they have a gradient."""
    case = dense()
    case.advantages[: B // 4 * 3] = 0.0
    kept = N // 4
    assert count(case, impl, TOKEN[0])[0].products(kept, H, V) == 3 + 3
    assert count(case, impl, TOKEN[0], with_metrics=False)[0].products(kept, H, V) == 3
    assert count(case, impl, SEQUENCE[0], with_metrics=False)[0].products(kept, H, V) == 3
    assert count(case, impl, make_config("dapo", beta=0.1))[0].products(N, H, V) == 3


@pytest.mark.parametrize("impl", LIBRARY)
def test_clipped_tokens_cost_no_gradient(impl):
    """They are known after scoring: one product for all, two for the remaining tokens."""
    case = dense(drift=1.0)
    recorded, result = count(case, impl, TOKEN[0])
    live = result.gradients.tokens
    assert N // 8 < live < N // 4 * 3
    assert recorded.flop == 2 * H * V * (N + 2 * live)


@pytest.mark.parametrize("impl", LIBRARY)
def test_tokens_without_a_gradient_are_not_scored_twice(impl):
    """If the batch is scored first, the remaining tokens take three more products; the others are dropped before."""
    recorded, result = count(dense(), impl, make_config("dapo", top_entropy_quantile=0.25))
    live = result.gradients.tokens
    assert live == N // 4
    assert recorded.flop == 2 * H * V * (N + 3 * live)


@pytest.mark.parametrize("chunks", [1, 4])
def test_matmul_calls_of_chunked(chunks):
    """Three for each chunk in fp32, whose weight is used in place."""
    case = dense()
    scratch = small_chunks(case, N // chunks)
    rows = engines.engine("chunked").chunk_rows(prepared(case)[0], MANY, scratch)
    recorded, _ = count(case, "chunked", TOKEN[0], scratch=scratch)
    made = -(-N // rows)
    assert made == chunks
    assert recorded.calls["mm"] + recorded.calls["addmm"] == 3 * made


def least_for_one_chunk(engine, head):
    """The smallest budget that holds N tokens."""
    most = engine.cost(head, N, 2**40).scratch_bytes
    return bisect.bisect_left(range(most + 1), True, lo=N * V, key=lambda b: engine.chunk_rows(head, MANY, b) >= N)


SUMMED_ANYWAY = (torch.float32, torch.float16)
"""dW is its own sum, or stays in fp32 for the upstream gradient."""


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_one_chunk_takes_the_memory_of_the_sum_that_it_saves(impl, monkeypatch):
    """Beside the default budget, no more than several chunks would take; a frozen head, fp32 or a budget has no sum."""
    pytest.importorskip("triton")
    bf16, *others = (Shape(N, H, V, dtype).head(torch.device("cpu")) for dtype in (torch.bfloat16, *SUMMED_ANYWAY))
    engine, dweight = engines.engine(impl), 4 * H * V
    budget = least_for_one_chunk(engine, bf16) - dweight
    for room, chunks in ((0, 1), (-1, 2)):
        monkeypatch.setitem(DEFAULT_SCRATCH_BYTES, "cpu", budget + room)
        assert len(even_chunks(N, engine.chunk_rows(bf16, N, None))) == chunks
        cost = engine.cost(bf16, N, None)
        assert cost.accumulator_bytes == (0 if chunks == 1 else dweight)
        assert cost.scratch_bytes + cost.accumulator_bytes <= budget + room + dweight
    monkeypatch.setitem(DEFAULT_SCRATCH_BYTES, "cpu", budget)
    assert engine.chunk_rows(bf16, MANY, None) == engine.chunk_rows(bf16, N, budget) < N
    assert all(engine.chunk_rows(head, N, None) < N for head in others)


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_a_slab_does_not_depend_on_what_is_active(impl, monkeypatch):
    """Else a step with more active tokens than all before would ask a GPU's allocator for new memory."""
    head_launch = pytest.importorskip("grpo_fused.kernels.head_launch")
    of, name = (chunked.Slab, "__init__") if impl == "chunked" else (head_launch.Exponentials, "empty")
    made, make = [], getattr(of, name)
    monkeypatch.setattr(of, name, lambda *x, **options: (made.append(x[-4:]), make(*x, **options))[1])
    case = dense(dtype=torch.bfloat16, B=2, T=8)
    for active in (16, 5):
        case.completion_mask.view(-1)[active:] = False
        count(case, impl, TOKEN[0])
    rows = [next(value for value in values if isinstance(value, int)) for values in made]
    assert rows == [16, 16]


def test_a_call_takes_one_chunk_where_the_rule_says_so(monkeypatch):
    """With dW; without it the same budget takes several."""
    case = dense(dtype=torch.bfloat16)
    least = least_for_one_chunk(engines.engine("chunked"), prepared(case)[0])
    monkeypatch.setitem(DEFAULT_SCRATCH_BYTES, "cpu", least - 4 * H * V)
    added, add = [], GradientSums.add
    monkeypatch.setattr(GradientSums, "add", lambda *x: (added.append(len(x[1])), add(*x)))
    assert count(case, "chunked", TOKEN[0])[1].gradients.weight.dtype == torch.bfloat16
    assert added == [N]
    added.clear()
    count(case, "chunked", TOKEN[0], needs=Needs(True, False, False))
    assert added == [N // 2, N // 2]


@pytest.mark.parametrize(("impl", "most"), [("chunked", 333), ("native", 260)])
def test_operators_of_a_call(impl, most):
    """The same number for many tokens as for few: no loop over tokens or sequences, and a bound against growth."""
    few, many = (count(dense(T=t, B=b), impl, TOKEN[0])[0] for t, b in ((8, 4), (32, 16)))
    assert few.calls == many.calls
    assert sum(few.calls.values()) <= most


@pytest.mark.parametrize("config", [*TOKEN, *SEQUENCE], ids=config_id)
def test_native_is_called_once_for_scores_and_once_for_gradients(config):
    reason = engines.unavailable("native", torch.device("cpu"), torch.float32)
    if reason is not None:
        pytest.skip(reason)
    calls = count(dense(), "native", config)[0].calls
    assert (calls["head_scores"], calls["head_gradient"], calls["mm"], calls["addmm"]) == (1, 1, 0, 0)


@pytest.mark.parametrize("impl", LIBRARY)
@pytest.mark.parametrize("config", [TOKEN[0], SEQUENCE[0], BATCH[0]], ids=config_id)
def test_without_compaction_nothing_waits_for_the_device(impl, config):
    """No operator whose result's shape, or a Python branch, depends on values."""
    waits = ("nonzero", "_local_scalar_dense", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2")
    recorded, _ = count(dense(masked=0.3), impl, config, compact=False)
    assert [name for name in waits if recorded.calls[name]] == []


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scratch", [None, 3 * 2**20], ids=["default", "3-MiB"])
@pytest.mark.parametrize("impl", LIBRARY)
def test_memory_is_that_of_the_engine_cost(impl, scratch, dtype):
    """Beyond gradients and per-token vectors no more than `Engine.cost`, which is also not much larger.

    Memory inside native's operators is not counted here; tests/native/test_engine.py measures the process's peak.
    """
    case = dense(dtype, B=16, T=32, H=8, V=8192)
    head, _, tokens = prepared(case)
    number = tokens.ids.shape[0]
    cost = engines.engine(impl).cost(head, number, scratch)
    assert scratch is None or cost.scratch_bytes <= scratch * (1 if impl == "chunked" else 2)
    recorded, result = count(case, impl, TOKEN[0], scratch=scratch)
    gradients = result.gradients.weight.nbytes + result.gradients.hidden.nbytes
    vectors = number * (4 * 8 * 4 + 8 * 64)  # rows of hidden states, [N] vectors
    seen = recorded.peak - gradients
    assert seen <= cost.scratch_bytes + vectors
    if impl == "chunked":
        assert seen >= cost.scratch_bytes // 2
    accumulated = result.gradients.weight.dtype != case.lm_head_weight.dtype
    assert cost.accumulator_bytes == (result.gradients.weight.nbytes if accumulated else 0)


@pytest.mark.parametrize("impl", LIBRARY)
def test_memory_does_not_grow_with_the_batch(impl):
    """Four times the tokens, the same scratch: only per-token tensors grow."""
    budget = 2**20
    peaks = []
    for sequences in (8, 32):
        case = dense(B=sequences, T=32, H=8, V=3000)
        recorded, result = count(case, impl, TOKEN[0], scratch=budget)
        peaks.append(recorded.peak - result.gradients.hidden.nbytes)
    assert peaks[1] - peaks[0] <= 768 * (4 * 8 * 4 + 8 * 64 + 4 * 128)


class Counting:
    """A test double of a kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


@pytest.mark.parametrize(
    ("config", "scratch", "options", "launches", "products"),
    [
        (TOKEN[0], None, {}, (2, 1, 1, 0), 2),
        (SEQUENCE[0], None, {}, (2, 1, 1, 0), 2),
        (TOKEN[-1], None, {}, (2, 1, 0, 1), 2),
        (BATCH[0], None, {}, (2, 1, 0, 0), 2),
    ],
    ids=["token", "sequence", "entropy gradient", "batch"],
)
def test_launches_of_triton(config, scratch, options, launches, products, monkeypatch):
    """The head kernel samples columns, then scores and stores; a launch merges, one makes a factor for each row (or
    dlogits); two library products follow."""
    reason = engines.unavailable("triton", torch.device("cpu"), torch.float32)
    if reason is not None:
        pytest.skip(reason)
    from grpo_fused.kernels import head_launch

    names = ("head_fwd", "finish_scores_fwd", "exponentials_factor", "exponentials_bwd")
    names = [f"{name}_kernel" for name in names]
    kernels = [Counting(getattr(head_launch, name)) for name in names]
    for name, kernel in zip(names, kernels, strict=True):
        monkeypatch.setattr(head_launch, name, kernel)
    case = dense(B=2, T=8, V=200)
    recorded, result = count(case, "triton", config)
    assert result.gradients.tokens == 16
    assert tuple(kernel.launches for kernel in kernels) == launches
    assert recorded.products(16, H, 200) == products


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp16_adds_to_dw_in_blocks_on_a_gpu(dtype):
    """One block, which the engine's cost has besides the fp32 dW."""
    with FakeTensorMode():
        head = Shape(8192, 4096, 151936, dtype).head(torch.device("cuda"))
        cost = engines.engine("chunked").cost(head, 8192, None)
    dweight = 4 * 151936 * 4096
    assert cost.accumulator_bytes == dweight + (32 * 2**20 if dtype == torch.float16 else 0)


def frames():
    """How many frames lie between `fused_linear_grpo_loss` and the caller, both included, torch's too."""
    names = [frame.name for frame in traceback.extract_stack()[:-1]]
    return len(names) - names.index("fused_linear_grpo_loss")


def test_frames_from_the_public_function_to_the_product(monkeypatch):
    """Six of ours and at most two of autograd around the function of the CPU library: a call is easy to follow."""
    reason = engines.unavailable("native", torch.device("cpu"), torch.float32)
    if reason is not None:
        pytest.skip(reason)
    real, counts = cpu_library.head_scores, []
    monkeypatch.setattr(cpu_library, "head_scores", lambda *a: (counts.append(frames()), real(*a))[1])
    dense(B=2, T=8, V=200).run(TOKEN[0], impl="native")
    (count,) = counts
    assert count <= 8  # 7 with torch 2.14


def test_frames_from_the_public_function_to_a_kernel(monkeypatch):
    """At most eight of ours, and two of autograd."""
    pytest.importorskip("triton")
    from grpo_fused.kernels import head_launch, launch

    counts = []

    class Seen(Counting):
        def __getitem__(self, grid):
            counts.append(frames())
            return super().__getitem__(grid)

    monkeypatch.setattr(head_launch, "head_fwd_kernel", Seen(head_launch.head_fwd_kernel))
    monkeypatch.setattr(launch, "row_loss_fwd_bwd_kernel", Seen(launch.row_loss_fwd_bwd_kernel))
    monkeypatch.setitem(engines._ENGINES, "chunked", ChunkedEngine(lambda device, dtype: launch.TritonRows()))
    case = dense(B=2, T=8, V=200)
    for impl in ("triton", "chunked"):
        case.run(TOKEN[0], impl=impl)
    _sampled_columns, *of_products = counts
    assert len(of_products) == 2
    assert max(of_products) <= 10


@pytest.mark.parametrize(
    ("count", "most", "want"),
    [(8192, 3533, [2816, 2816, 2560]), (410, 410, [410]), (820, 410, [410, 410]), (1024, 410, [384, 384, 256]),
     (130, 128, [80, 50]), (5, 2, [2, 2, 1]), (0, 7, [])],
)  # fmt: skip
def test_chunks_share_the_rows_evenly(count, most, want):
    """As few as fit, without a short last one, which would read the weight for few rows; multiples of 16, 64 or 128."""
    assert [chunk.stop - chunk.start for chunk in even_chunks(count, most)] == want


def test_row_kernels_reserve_no_temporaries():
    """Their chunks get the memory that torch's row work needs for its blocks, and the prediction says so."""
    launch, row = pytest.importorskip("grpo_fused.kernels.launch"), 4 * 151936
    head = Shape(8192, 64, 151936, torch.bfloat16).head(torch.device("cpu"))
    torch_rows, kernels = ChunkedEngine(), ChunkedEngine(lambda device, dtype: launch.TritonRows())
    budget = 512 * 2**20
    spared = kernels.chunk_rows(head, MANY, budget) - torch_rows.chunk_rows(head, MANY, budget)
    assert 16 <= spared <= 3 * (4 * 2**20 // row) + 15
    for engine in (torch_rows, kernels):
        assert engine.cost(head, 8192, budget).scratch_bytes <= budget
