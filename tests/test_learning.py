"""The studies of learning: statistics, arms that differ in nothing but the trainer, tables and pictures."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import fmean

import pytest
import torch

from benchmarks import learning, learning_options, learning_page, length_bias, seeds, small_policy
from benchmarks.equivalence import compare
from benchmarks.results import Run
from benchmarks.small_policy import ARMS, Recipe
from grpo_fused.trainer import GRPOTrainerConfig

TINY = Recipe(warmup=0, steps=2, prompts_per_step=2, num_generations=4, max_completion_length=6, learning_rate=1e-3)
ABOUT = {"name": "A machine", "commit": "abc", "dirty": False, "date": "2026-01-01T00:00:00"}


def test_differences_are_paired_and_have_the_interval_of_t():
    pytest.importorskip("scipy")
    row = compare([0.51, 0.62, 0.73, 0.84], [0.50, 0.60, 0.70, 0.80], bound=0.04)
    half = 3.182446305 * row["sd"] / 2  # quantile 0.975 of t with 3 degrees of freedom; n = 4
    assert row["mean"] == pytest.approx(0.025)
    assert (row["mean_of_values"], row["mean_of_baseline"]) == pytest.approx((0.675, 0.65))
    assert row["sd"] == pytest.approx(0.0129099, rel=1e-5)
    assert (row["low"], row["high"]) == pytest.approx((0.025 - half, 0.025 + half))
    assert row["p"] == pytest.approx(0.0514, abs=1e-4)  # one-sided, t = (0.04 - 0.025) / (sd / 2) = 2.324
    assert row["p_difference"] == pytest.approx(0.0305, abs=1e-4)  # two-sided, t = 3.873


@pytest.mark.parametrize("sign", [1, -1])
def test_equality_is_not_shown_by_a_mean_beyond_the_bound_or_by_few_noisy_seeds(sign):
    pytest.importorskip("scipy")
    beyond = compare([sign * v for v in (0.030, 0.031, 0.029)], [0.0] * 3, bound=0.02)
    assert beyond["p"] > 0.99
    assert beyond["p_difference"] < 0.01
    noisy = compare([sign * 0.1, sign * -0.1], [0.0, 0.0], bound=0.02)
    assert noisy["p"] > 0.4
    assert noisy["p_difference"] == pytest.approx(1.0)


def test_equal_runs_need_no_statistics():
    assert compare([0.5, 0.6], [0.5, 0.6], bound=0.02)["p"] == 0.0
    apart = compare([0.5, 0.75], [0.25, 0.5], bound=0.02)
    assert (apart["p"], apart["p_difference"], apart["low"]) == (1.0, 0.0, 0.25)


@pytest.mark.parametrize(
    ("values", "baseline", "bound", "message"),
    [
        ([1.0], [1.0], 0.1, "two or more seeds"),
        ([1.0, 2.0], [1.0], 0.1, "got 2 and 1"),
        ([1.0] * 2, [1.0] * 2, 0.0, "> 0"),
    ],
)
def test_comparisons_that_are_refused(values, baseline, bound, message):
    with pytest.raises(ValueError, match=message):
        compare(values, baseline, bound)


@pytest.fixture
def model(monkeypatch):
    """A random policy, and a judge whose verdicts differ within a group."""
    pytest.importorskip("trl")
    data = small_policy.sums()._replace(judge=lambda text, row: float(sum(map(ord, text)) % 2))
    monkeypatch.setattr(small_policy, "data_of", lambda task: data)
    monkeypatch.setattr(small_policy, "VOCAB", 32)  # few tokens that no text has
    return small_policy.start("sums", 0, 0)


def test_each_arm_takes_the_same_problems_and_leaves_the_start_as_it_is(model):
    before = small_policy.weights(model).clone()
    found = {arm: small_policy.train(arm, TINY, 3, model) for arm in ARMS}
    assert torch.equal(small_policy.weights(model), before)
    for trained in found.values():
        assert len(trained.rewards) == len(trained.lengths) == TINY.steps
        assert not torch.equal(small_policy.weights(trained.model), before)
        assert 0 < max(trained.rewards) < 1
    # all of TRL's sample alike, so they do the same
    assert found["fused_trl"].completion_ids == found["patched_trl"].completion_ids == found["trl"].completion_ids
    assert found["ours"].completion_ids != found["trl"].completion_ids
    with pytest.raises(ValueError, match="arm must be one of ours, .*'theirs'"):
        small_policy.train("theirs", TINY, 3, model)
    with pytest.raises(ValueError, match="options of our trainer; got them with trl"):
        small_policy.train("trl", replace(TINY, share_prompts=True), 3, model)


def test_a_replay_finds_an_option_that_differs(model, monkeypatch):
    monkeypatch.setattr(learning, "REPLAYED_STEPS", TINY.steps)
    assert learning.replay(TINY, 3, model) < 1e-3
    train = small_policy.train

    def slower(arm, recipe, *args, **kwargs):
        return train(
            arm, replace(recipe, learning_rate=recipe.learning_rate * (0.9 if arm == "ours" else 1)), *args, **kwargs
        )

    monkeypatch.setattr(learning, "train", slower)
    assert learning.replay(TINY, 3, model) > 0.05


def test_a_rollout_without_advantages_is_a_step_of_adamw_in_trl_and_none_in_ours(model, monkeypatch):
    """The one difference that the study knows of; docs/study.md tells it."""
    data = small_policy.data_of("sums")
    last = [row["prompt"] for row in data.rows(3, 4)[2:]]
    equal = data._replace(judge=lambda text, row: 0.0 if row["prompt"] in last else data.judge(text, row))
    monkeypatch.setattr(small_policy, "data_of", lambda task: equal)
    monkeypatch.setattr(learning, "REPLAYED_STEPS", TINY.steps)
    assert learning.replay(TINY, 3, model) > 0.05


def test_problems_in_another_order_are_an_error(model, monkeypatch):
    ours = small_policy.train_ours
    monkeypatch.setattr(
        small_policy, "train_ours", lambda r, s, m, j, rows, replay: ours(r, s, m, j, rows[::-1], replay)
    )
    with pytest.raises(RuntimeError, match="in their order"):
        small_policy.train("ours", TINY, 3, model)


def test_a_process_may_train_in_fp32_and_then_in_bf16(model):
    runs = [small_policy.train(arm, replace(TINY, bf16=b), 3, model) for arm in ("ours", "trl") for b in (False, True)]
    ends = [small_policy.weights(run.model) for run in runs]
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[2], ends[3])
    assert all(end.dtype == torch.float32 for end in ends)


def test_without_sets_the_loss_gets_none(model):
    recipe = replace(TINY, top_p=0.5, steps=1)
    with_sets, without = (
        small_policy.train("ours", replace(recipe, keeps_sets=kept), 3, model) for kept in (True, False)
    )
    assert with_sets.completion_ids == without.completion_ids
    assert not torch.equal(small_policy.weights(with_sets.model), small_policy.weights(without.model))


@pytest.mark.parametrize("option", learning_options.OPTIONS.values(), ids=learning_options.OPTIONS)
def test_options_are_recipes_and_have_their_baseline(option):
    recipe = replace(Recipe(), **option.changes)
    small_policy.GRPOLossConfig(**recipe.loss)
    GRPOTrainerConfig(share_prompts=recipe.share_prompts, top_p=recipe.top_p)
    if option.baseline is not None:
        base = learning_options.OPTIONS[option.baseline]
        assert base.baseline is None or option.baseline == "grpo"
        assert asdict(recipe) != asdict(replace(Recipe(), **base.changes))


@pytest.mark.parametrize("int8_head", [False, True])
def test_an_adapter_is_what_is_trained(model, int8_head):
    if int8_head:
        pytest.importorskip("torchao.quantization")
    pytest.importorskip("peft")
    recipe = replace(TINY, steps=1, lora=4, int8_head=int8_head)
    trained = small_policy.train("ours", recipe, 3, model).model
    changed = {name for name, x in trained.named_parameters() if x.requires_grad and "lora_B" in name and x.any()}
    assert any("lm_head" in name for name in changed)
    assert all("lora" in name for name, x in trained.named_parameters() if x.requires_grad)
    weight = trained.get_output_embeddings().base_layer.weight
    assert (getattr(weight, "qdata", weight).dtype == torch.int8) == int8_head
    assert 0 <= small_policy.accuracy(trained, recipe) <= 1


def test_the_demonstrations_and_the_judge_of_the_length_task():
    data = small_policy.answer_first()
    right = sum(data.judge(row["completion"], _answer(row)) for row in data.demonstrations) / len(data.demonstrations)
    assert 0.45 < right < 0.55
    assert data.judge("12....", {"answer": "12"}) == 1.0
    assert data.judge("12...1", {"answer": "12"}) == 0.0
    assert len(data.rows(1, 400)) == 400
    assert data.rows(1, 40) == data.rows(1, 40) != data.rows(2, 40)


def _answer(row):
    a, b = row["prompt"].rstrip("=").split("+")
    return {"answer": str(int(a) + int(b))}


def test_countdown_holds_out_problems_that_are_in_no_run():
    pytest.importorskip("reasoning_gym")
    data = small_policy.countdown()
    held_out = {row["prompt"] for row in data.held_out}
    assert len(held_out) == len(data.held_out) > 900
    assert not held_out & {row["prompt"] for row in (*data.rows(3, 200), *data.demonstrations)}
    row = data.held_out[0]
    assert data.judge(row["answer"].replace(" ", ""), row) == 1.0
    assert data.judge(row["answer"] + "+1", row) == 0.0


def test_runs_that_a_file_lacks_are_made_seed_by_seed(tmp_path, monkeypatch):
    started: list[int] = []
    monkeypatch.setattr(seeds, "start", lambda task, seed, warmup: started.append(seed))
    monkeypatch.setattr(seeds, "accuracy", lambda model, recipe: 0.25)
    (tmp_path / "runs.jsonl").write_text('{"seed": 0, "arm": "a", "after": 0.5, "rewards": [1.0]}\n')
    arms = [({"arm": "a"}, 2), ({"arm": "b"}, 3)]

    def each(work):
        return list(
            seeds.each_run(work, seeds.warmed_up(TINY), arms, lambda arm, seed, model: {"after": float(seed)}, len)
        )

    assert each(tmp_path) == [2, 3, 4, 5, 5]
    assert [(run["seed"], run["arm"]) for run in seeds.read_runs(tmp_path / "runs.jsonl")] == [
        (0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "b")
    ]  # fmt: skip
    assert {run["before"] for run in seeds.read_runs(tmp_path / "runs.jsonl")[1:]} == {0.25}
    assert started == [0, 1, 2]
    assert each(tmp_path) == [5]
    assert started == [0, 1, 2]


def test_the_weight_of_a_token_by_length():
    weights = {loss: length_bias.token_weights(options) for loss, options in length_bias.LOSSES.items()}
    assert weights["grpo"] == pytest.approx([1 / length for length in length_bias.LENGTHS])
    assert weights["dapo"] == pytest.approx([1.0] * len(length_bias.LENGTHS))
    assert weights["dr_grpo"] == pytest.approx([1.0] * len(length_bias.LENGTHS))


def test_the_change_of_a_length_is_that_since_the_first_rollout():
    assert length_bias.change([5.0, 100.0, *[7.0] * 8, None, 9.0]) == pytest.approx(fmean([7.0] * 8 + [9.0]) - 5.0)
    assert length_bias.change([None, *[1.0] * 10]) is None
    assert length_bias.change([1.0, *[None] * 10]) is None


def learning_section() -> dict:
    rows = [
        {
            "seed": seed,
            "arm": arm,
            "commit": f"c{seed}",
            "before": 0.1,
            "after": 0.7 + 0.01 * seed + shift * (-1) ** seed,
            "rewards": [0.1 * step + 0.01 * seed for step in range(6)],
        }
        for arm, shift, seeds in (("ours", 0.002, 4), ("fused_trl", 0.0, 2), ("patched_trl", 0.0, 2), ("trl", 0.0, 4))
        for seed in range(seeds)
    ]
    replays = [{"seed": 0, "arm": "replay", "difference": 3e-5}]
    return learning.section_of(Recipe(), [*rows, *replays])


def options_section() -> dict:
    rows = [
        {
            "seed": seed,
            "option": option,
            "commit": "c",
            "after": 0.6 + 0.01 * seed - 0.1 * (option == "no_sets") + 0.001 * seed * i,
        }
        for i, option in enumerate(learning_options.OPTIONS)
        for seed in range(3)
    ]
    return learning_options.section_of([*rows, {"seed": 3, "option": "dapo", "commit": "c", "after": 0.6}])


def length_section() -> dict:
    rows = [
        {
            "seed": s,
            "loss": loss,
            "commit": "c",
            "right": [5.0] * 11 + [None],
            "wrong": [None if s == 2 else 5.0, *[5.0 + grows * (1 + s)] * 11],
        }
        for loss, grows in (("grpo", 2.0), ("dapo", 0.5), ("dr_grpo", 0.0))
        for s in range(3)
    ]
    return length_bias.section_of(rows)


def test_each_arm_is_compared_over_the_seeds_that_it_shares_with_stock_trl():
    pytest.importorskip("scipy")
    section = learning_section()
    assert {arm: row["n"] for arm, row in section["arms"].items()} == {
        "ours": 4,
        "fused_trl": 2,
        "patched_trl": 2,
        "trl": 4,
    }
    assert {arm: row["n"] for arm, row in section["against_trl"].items()} == {
        "ours": 4,
        "fused_trl": 2,
        "patched_trl": 2,
    }
    assert section["against_trl"]["ours"]["mean"] == pytest.approx(0.0)
    assert section["replay"] == [3e-5]
    alone = {"seed": 9, "arm": "ours", "commit": "c", "before": 0.1, "after": 0.5}
    assert learning.section_of(Recipe(), [*section["runs"], alone])["against_trl"]["ours"]["n"] == 4


def test_options_are_compared_over_the_seeds_of_their_baseline():
    pytest.importorskip("scipy")
    section = options_section()
    assert {name: row["n"] for name, row in section["arms"].items()}["dapo"] == 4
    assert {row["n"] for row in section["against"].values()} == {3}
    assert section["against"]["no_sets"]["mean"] == pytest.approx(-0.1 + 0.001)
    assert section["against"].keys() == learning_options.OPTIONS.keys() - {"dapo", "sets"}


def test_lengths_are_compared_over_the_seeds_that_have_them():
    pytest.importorskip("scipy")
    section = length_section()
    assert section["wrong"]["seeds"] == [0, 1]
    assert section["wrong"]["against_dr_grpo"]["grpo"]["mean"] == pytest.approx(3.0)
    assert section["right"]["seeds"] == [0, 1, 2]


def test_tables():
    pytest.importorskip("scipy")
    run, section = Run(None, ABOUT, {}), learning_section()
    table = learning_page.comparison(section, run)
    assert "| our trainer | 4 | 71.5% | 1.2 | +0.0 | -0.4 to +0.4 | < 0.001 |" in table
    assert "| stock TRL | 4 | 71.5% | 1.3 |  |  |  |" in table
    assert "20 optimizer steps" in table
    assert "at most 3e-05 of the way (1 seeds)" in table
    assert "trained at c0, c1, c2, c3." in table
    assert "since 40 seeds are planned: equality is not claimed yet (two one" in learning_page.sentence(section, run)
    section["against_trl"]["ours"]["n"] = 40
    said = learning_page.sentence(section, run)
    assert "Over 40 seeds a small policy reaches an accuracy of 71.5% in our trainer and of 71.5% in stock TRL" in said
    assert "equality within 2 points is shown (two one-sided tests, p < 0.001)" in said
    section["against_trl"]["ours"]["p"] = 0.2
    assert "equality within 2 points is not shown (two one-sided tests, p = 0.200)" in learning_page.sentence(
        section, run
    )
    assert (
        "| top-p 0.9, no candidate sets | 3 | 52.1% | 2.1 | top-p 0.9, candidate sets | -9.9 |"
        in learning_page.options(options_section(), run)
    )
    lengths = learning_page.length_bias(length_section(), run)
    assert "| `grpo` | 1 | 0.5 | 0.25 | 0.125 | 0.0625 |" in lengths
    assert (
        "| `grpo` | +3.0 (-9.7 to +15.7) | +3.0 (-9.7 to +15.7) | +0.0 (+0.0 to +0.0) | +0.0 (+0.0 to +0.0) |"
        in lengths
    )
    assert "over 2 seeds" in lengths


def test_pictures_show_every_seed(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    for draw, section, expected in (
        (learning_page.learning_plot, learning_section(), 12 + 8),
        (learning_page.options_plot, options_section(), 10 * 3),
    ):
        figure = draw(section)
        assert (
            sum(len(part.get_offsets()) for axes in figure.axes for part in axes.collections if _is_points(part))
            == expected
        )
        figure.savefig(tmp_path / "a.svg")
    lines = [line for axes in learning_page.length_plot(length_section()).axes for line in axes.lines]
    assert len(lines) == 2 * 3 * (3 + 1)


def test_a_band_is_of_the_seeds_that_all_arms_have():
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    axes = learning_page.learning_plot(learning_section()).axes[0]
    assert len(axes.lines) == 4
    for line, band in zip(axes.lines, axes.collections, strict=True):
        # rewards are 0.1 * step + 0.01 * seed, of the seeds 0 and 1; the last point is of the steps 1 to 5
        assert line.get_ydata()[-1] == pytest.approx(0.3 + 0.005)
        last = [y for x, y in band.get_paths()[0].vertices if x == 6]
        assert (min(last), max(last)) == pytest.approx((0.305 - 0.01 / 2**0.5, 0.305 + 0.01 / 2**0.5))


def _is_points(part) -> bool:
    return type(part).__name__ == "PathCollection"
