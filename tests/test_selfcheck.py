"""`python -m grpo_fused check` passes here, and detects defects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from grpo_fused import GRPOLossConfig, __main__, engines, testing
from grpo_fused.call.loss_types import LOSS_TYPES
from grpo_fused.engines import libraries, rows
from grpo_fused.engines.pairs import Pairs
from grpo_fused.objective import formulas as objective
from grpo_fused.tools import check


def test_passes(capsys):
    check.main(["--quick"])
    lines = capsys.readouterr().out.splitlines()
    names = {"chunked"} | ({"native"} if libraries.cpu_available() is None else set())
    checks = [line for line in lines if line.startswith("ok ")]
    assert {line.split()[1] for line in checks} >= names
    assert lines[-1].startswith(f"all {len(checks)} checks passed")
    assert len(checks) >= 30 * len(names)
    assert sum("candidate sets" in line for line in checks) == 3 * len(names)
    assert not any("chunked on cpu float64" in line for line in checks)


def test_the_bound_of_a_loss_covers_errors_of_one_sign():
    """The weights of vespo have no gradient, and change with the log-probs."""
    problem = check.problem_of(torch.float64)
    allowed = {
        name: problem.bounds(GRPOLossConfig(loss_type=name), torch.float16)["loss"] for name in ("dapo", "vespo")
    }
    assert allowed["dapo"] < 1e-4 < allowed["vespo"] < 1e-3


def test_covers_every_option():
    configs = [check.GRPOLossConfig(**options) for options in check.OBJECTIVES.values()]
    assert {config.loss_type for config in configs} == set(LOSS_TYPES)
    assert {config.importance_sampling_level for config in configs} == {"token", "sequence", "sequence_token"}
    assert {config.kl_estimator for config in configs if config.beta} == {"k1", "k2", "k3"}
    for option in ("entropy_coef", "delta", "dual_clip", "off_policy_mask_threshold"):
        assert any(getattr(config, option) for config in configs), option
    assert any(config.top_entropy_quantile < 1 for config in configs)
    problem = check.problem_of(torch.float32)
    assert problem.hidden_states.isnan().any(), "masked positions are poisoned"
    assert problem.options["old_per_token_logps"].isnan().any()
    assert (problem.completion_ids == -100).any()
    assert not check.problem_of(torch.float32, **check.INPUTS["nothing active"].options).completion_mask.any()


BREAKAGES = {
    "logp": (rows, "_statistics", lambda out: out._replace(logp=out.logp - 2e-4)),
    "dH": (rows, "gradient_of_scores", lambda out: out * 1.001),
    "loss": (objective, "_policy_factor", lambda out: 1.01 if out is None else out * 1.01),
}


@pytest.mark.parametrize("what", BREAKAGES)
def test_detects_defects(what, monkeypatch, capsys):
    """The reference does not use these functions."""
    module, name, spoil = BREAKAGES[what]
    whole = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: spoil(whole(*args, **kwargs)))
    with pytest.raises(SystemExit) as stopped:
        check.main(["--quick", "--engines", "chunked"])
    assert "checks failed: chunked on cpu float32 dapo;" in str(stopped.value)
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert "chunked on cpu float32 dapo " in failed[0]


def test_an_engine_that_raises_does_not_hide_the_next(monkeypatch, capsys):
    cpu = torch.device("cpu")
    monkeypatch.setattr(check, "_engines_here", lambda: [("cuda", cpu), ("chunked", cpu)])
    monkeypatch.setattr(check, "INPUTS", {"": check.Inputs({}, ("dapo",))})
    monkeypatch.setattr(engines, "unavailable", lambda *_: None)
    with pytest.raises(SystemExit, match="1 of 5 checks failed: cuda on cpu$"):
        check.main(["--quick"])
    printed = capsys.readouterr()
    assert "FAIL  cuda on cpu" in printed.out
    assert "ok    chunked on cpu float32 dapo" in printed.out
    assert "Traceback" in printed.err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_log_ratio_is_near_a_clip_bound(dtype):
    """Otherwise rounding would decide on which side it is."""
    problem = check.problem_of(dtype)
    exact = problem.to(torch.float64).score("reference") - problem.options["old_per_token_logps"]
    bounds = torch.tensor([0.8, 1.2, 1.28, 1.4, 1.5, 2.3], dtype=torch.float64).log()
    bounds = torch.cat([bounds, torch.tensor([-0.2, 0.2])])  # GMPO's are of the logarithm
    active = exact[problem.completion_mask]
    assert (active[:, None] - bounds).abs().min() > 10 * testing.LOGP_BOUND
    assert active.std() > 0.2


@pytest.mark.parametrize("name", ["products", "sums"])
def test_detects_defects_of_candidate_sets(name, monkeypatch):
    """Those within them are checked in every dtype of an engine; here in torch operations, as on a GPU."""
    monkeypatch.setattr(engines, "pairs", lambda *_: Pairs())
    monkeypatch.setattr(check, "INPUTS", {"": check.INPUTS["candidate sets"]})

    def found():
        checks = list(check.checks_of("chunked", torch.device("cpu"), quick=False))
        return [each for each in checks if not each.name.endswith("batch")]

    assert len(found()) == 4 * 3
    assert all(each.passed for each in found())
    whole = getattr(Pairs, name)
    monkeypatch.setattr(Pairs, name, lambda *args, **kwargs: whole(*args, **kwargs) * 1.05)
    spoiled = "logp" if name == "products" else "dweight"
    for each in found():
        assert each.errors[spoiled][0] > each.errors[spoiled][1]


@pytest.mark.parametrize("engine", ["chunked", "native"])
def test_detects_scores_that_change_with_the_batch(engine, monkeypatch):
    monkeypatch.setattr(testing.Problem, "score", lambda self, impl: torch.rand(self.completion_ids.shape))
    if engine == "native" and libraries.cpu_available() is not None:
        pytest.skip("not built")
    found = check.batch_independence(engine, torch.device("cpu"), torch.float32)
    assert not found.passed
    assert found.errors["in a batch"][0] > 0


def test_detects_scores_that_change_with_the_order(monkeypatch):
    """Only those of the whole batch do."""
    first = []

    def score(self, impl):
        ids = self.completion_ids.float()
        first.append(ids[0, 0])
        return ids + (len(ids) == 360 and ids[0, 0] != first[0])

    monkeypatch.setattr(testing.Problem, "score", score)
    assert check.batch_independence("chunked", torch.device("cpu"), torch.float32).errors["in a batch"][0] == 1


@pytest.mark.parametrize("name", ["dhidden", "dweight"])
def test_detects_training_that_differs_from_scoring_or_between_two_runs(name, monkeypatch):
    calls = []

    def run(self, config, impl):
        calls.append(impl)
        logps = torch.ones(self.completion_ids.shape)
        gradients = {"dhidden": torch.zeros(2), "dweight": torch.zeros(2), "dbias": None}
        gradients[name] = torch.full((2,), float(len(calls)))
        return testing.Result(SimpleNamespace(loss=torch.zeros(()), per_token_logps=logps), **gradients)

    monkeypatch.setattr(testing.Problem, "run", run)
    monkeypatch.setattr(testing.Problem, "score", lambda self, impl: torch.zeros(self.completion_ids.shape))
    found = check.batch_independence("native", torch.device("cpu"), torch.float32)
    assert found.errors == {"in a batch": (0, 0), "in training": (1, 0), "twice": (1, 0)}


def test_a_problem_has_what_it_says():
    """An empty sequence, a bias of its dtype; packed, masked tokens in some sequences alone."""
    problem = testing.make_problem(B=4, T=20, V=9, dtype=torch.bfloat16, lm_head_bias=torch.zeros(9))
    assert problem.completion_mask.any(1).tolist() == [True, False, True, True]
    assert problem.options["lm_head_bias"].dtype == torch.bfloat16
    assert problem.compare(GRPOLossConfig(), impl="chunked")["masked"] == (0, 0)
    packed = problem.packed()
    rows = packed.completion_mask.split(packed.options["cu_seqlens"].diff().tolist())
    assert [len(row) for row in rows] == [20, 0, 20, int(problem.completion_mask[3].sum())]
    assert [bool(row.all()) for row in rows] == [False, True, False, True]
    assert "cu_seqlens" in check.problem_of(torch.float32, packed=True).options


def test_an_error_in_one_thread_leaves_the_number_of_threads(monkeypatch):
    def score(self, impl):
        if torch.get_num_threads() == 1:
            raise RuntimeError("one thread")
        return torch.zeros(self.completion_ids.shape)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(testing.Problem, "score", score)
        with pytest.raises(RuntimeError, match="one thread"):
            check.batch_independence("native", torch.device("cpu"), torch.float32)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_nan_fails():
    assert not check.Check("x", {"logp": (float("nan"), 1.0)}).passed
    assert testing.largest(torch.tensor([0.0, torch.nan])) == float("inf")


def test_bounds_follow_the_contract():
    assert testing.logp_bound(10.0) == testing.logp_bound(32.0) == 1e-4
    assert testing.logp_bound(320.0) == pytest.approx(1e-3)


def test_an_engine_that_does_not_run_is_an_error():
    with pytest.raises(SystemExit, match="--engines: nativ, none does not run here, .*; these do: .*chunked"):
        __main__.main(["check", "--engines", "chunked", "nativ", "none"])
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["check", "--engines"])


def test_every_engine_of_a_gpu(monkeypatch):
    """Of those that can run; the interpreter of triton does not run on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check.engines, "unavailable", lambda name, device, dtype: None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    found = [(name, device.type) for name, device in check._engines_here()]
    assert found == [(e, "cpu") for e in ("native", "chunked")] + [(e, "cuda") for e in ("chunked", "cuda", "triton")]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert [name for name, device in check._engines_here() if device.type == "cuda"] == ["chunked", "cuda"]
    monkeypatch.setattr(check.engines, "unavailable", lambda name, device, dtype: "no" if name == "cuda" else None)
    assert [name for name, device in check._engines_here() if device.type == "cuda"] == ["chunked"]


def test_a_problem_is_packed_on_its_own_device():
    """The default device is another one here, as that of a problem on a GPU is."""
    problem = testing.make_problem()
    with torch.device("meta"):
        assert problem.packed().options["cu_seqlens"].device.type == "cpu"


def test_a_packed_problem_has_the_sets_of_its_tokens():
    problem = testing.make_problem(kept=0.2)
    losses = [each.run(GRPOLossConfig(), impl="chunked").out.loss for each in (problem, problem.packed())]
    torch.testing.assert_close(losses[0], losses[1])
