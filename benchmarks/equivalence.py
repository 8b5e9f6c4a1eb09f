"""Whether two ways to train end at the same accuracy: paired differences, their interval, two one-sided tests."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

CONFIDENCE = 0.95


def compare(values: Sequence[float], baseline: Sequence[float], bound: float) -> dict[str, Any]:
    """Statistics of the differences `values - baseline`, seed by seed.

    The equivalence test (TOST; Schuirmann 1987) has two null hypotheses, that the mean difference is at most `-bound`
    and that it is at least `bound`; each is tested by a one-sided t-test, and `p` is the larger of the two values.

    Args:
        values: Of one arm, a value for each seed.
        baseline: Of the arm that it is compared with, for the same seeds.
        bound: The smallest difference that counts, in the unit of the values; > 0.

    Returns:
        n, mean, sd, the means of both sides, `low` and `high` (95 % t-interval of the mean difference), `p` of the
        equivalence test, and `p_difference` of the two-sided t-test, 1 if all differences are 0.

    Raises:
        ValueError: Fewer than two seeds, not the same number on both sides, or a bound that is not positive.
    """
    if len(values) != len(baseline) or len(values) < 2:
        raise ValueError(f"expected the same two or more seeds on both sides; got {len(values)} and {len(baseline)}")
    if bound <= 0:
        raise ValueError(f"bound must be > 0; got {bound}")
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    mean, sd = fmean(differences), stdev(differences)
    row = {"n": len(differences), "mean": mean, "sd": sd, "bound": bound}
    row |= {"mean_of_values": fmean(values), "mean_of_baseline": fmean(baseline)}
    if sd == 0:  # no t-statistic: the differences are one number
        return row | {"low": mean, "high": mean, "p": float(abs(mean) >= bound), "p_difference": float(mean == 0)}
    from scipy import stats

    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(CONFIDENCE)
    above = stats.ttest_1samp(differences, -bound, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, bound, alternative="less").pvalue
    p = {"p": float(max(above, below)), "p_difference": float(test.pvalue)}
    return row | {"low": float(low), "high": float(high)} | p


def describe(values: Sequence[float]) -> dict[str, float]:
    """Number, mean and standard deviation (0 for one value)."""
    return {"n": len(values), "mean": fmean(values), "sd": stdev(values) if len(values) > 1 else 0.0}


def values_of(runs: list[dict[str, Any]], arm: str, value: str = "after") -> dict[str, dict[int, float]]:
    """Of each arm, which a field of the runs tells, a value by seed."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        found.setdefault(run[arm], {})[run["seed"]] = run[value]
    return found


def paired(values: dict[str, dict[int, float]], baselines: dict[str, str], bound: float) -> dict[str, dict[str, Any]]:
    """Each arm compared with its baseline, over the seeds that both have; only those with two or more."""
    found = {}
    for arm, baseline in baselines.items():
        seeds = sorted(values.get(arm, {}).keys() & values.get(baseline, {}).keys())
        if len(seeds) > 1:
            found[arm] = compare(*([values[one][seed] for seed in seeds] for one in (arm, baseline)), bound)
    return found


def statistics_of(trained: list[dict[str, Any]], bound: float, baseline: str = "trl") -> dict[str, Any]:
    """The mean and spread of each arm; its differences from the baseline, over the seeds that both have.

    Args:
        trained: Runs: `arm`, `seed`, the accuracies `before` and `after`, and more.
        bound: See `compare`.
        baseline: An arm; stock TRL by default.
    """
    after = values_of(trained, "arm")
    before = {row["seed"]: row["before"] for row in trained}
    return {
        "bound": bound,
        "before": describe([before[seed] for seed in sorted(before)]) if before else None,
        "arms": {arm: describe(list(values.values())) for arm, values in after.items()},
        f"against_{baseline}": paired(after, {arm: baseline for arm in after if arm != baseline}, bound),
        "runs": trained,
    }  # fmt: skip
