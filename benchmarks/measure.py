"""One problem, many providers: each result checked against float64, then timed in turns with the bare products.

The CPU and GPU programs share `sections`, which goes through a list of problems. The row of a provider has its errors,
and its times or the reason that there are none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Annotated, Any, Literal, NamedTuple

import torch

from benchmarks import memory as peaks
from benchmarks.exact import Exact, judged
from benchmarks.problem import DTYPES, PATTERNS, Case, clear, shares, train
from benchmarks.providers import PEERS, PROVIDERS, Provider, available
from benchmarks.timing import Calls, bare_gemms, copy_bandwidth, times_by_round, with_ratios
from grpo_fused.testing import Problem

BASES = {"forward": "bare-1", "forward_backward": "bare-3", "scoring": "bare-1"}
"""The calls that are timed, and the bare products for comparison."""


Cases = Annotated[tuple[str, ...], "prefixes of names; default all"]
Small = Annotated[bool, "one small problem, to test the program"]
Patterns = Annotated[tuple[Literal[tuple(PATTERNS)], ...], "which tokens have a gradient; default all"]
Peers = Annotated[tuple[Literal[PEERS], ...], "default all; none: ours and the bare products only"]
Memory = Annotated[bool, "peak memory; on a CPU in fresh processes"]
Seconds = Annotated[float | None, "start nothing new after this"]
"""Options of both programs."""


class Plan(NamedTuple):
    """A problem and its providers."""

    case: Case
    peers: tuple[str, ...] = PEERS
    memory: bool = True


def call_of(provider: Provider, what: str, problem: Problem) -> Callable[[], object]:
    """The loss without gradient, the loss with its gradients, or the log-probs without gradient."""
    if what == "forward_backward":
        return partial(train, problem, provider.loss)
    return torch.no_grad()(partial(provider.loss if what == "forward" else provider.logps, problem))


def check(provider: Provider, problem: Problem, exact: Exact) -> dict[str, float]:
    """Errors of the loss, its gradients and the log-probs. Every path that is timed is called once."""
    loss = train(problem, provider.loss)
    errors = {"loss": exact.loss_error(loss), **exact.gradient_errors(problem)}
    clear(problem)
    if provider.logps is not None:
        with torch.no_grad():
            errors["logp"] = exact.logp_error(provider.logps(problem), problem)
    return errors


Verdict = Callable[[Provider], dict[str, Any]]
"""A provider to its errors, and why it is not timed if it is not."""


def verdicts(problem: Problem) -> Verdict:
    """Of the results of a problem, each by the loss that its provider computes."""
    exact_of = cache(partial(Exact.of, problem))

    def verdict(provider: Provider) -> dict[str, Any]:
        def errors() -> dict[str, float]:
            return check(provider, problem, exact_of(provider.per_token))

        return judged(errors, problem.hidden_states.dtype, ours=provider.ours)

    return verdict


def measure(case: Case, device: str, providers: dict[str, Provider], *, rounds: int) -> dict[str, Any]:
    """Errors, times and ratios of forward + backward and of scoring."""
    torch.compiler.reset()  # or the compilations of other shapes count towards this one's limit
    problem = case.problem(device)
    verdict = verdicts(problem)
    bare = bare_gemms(case.N, case.H, case.V, DTYPES[case.dtype], device)
    calls: dict[str, Calls] = {what: {BASES[what]: bare[BASES[what]]} for what in ("forward_backward", "scoring")}
    rows: dict[str, dict[str, Any]] = {}
    for name, provider in providers.items():
        rows[name] = verdict(provider)
        peaks.release(device)
        if "not_timed" not in rows[name]:
            calls["forward_backward"][name] = call_of(provider, "forward_backward", problem)
            if provider.logps is not None:
                calls["scoring"][name] = call_of(provider, "scoring", problem)
    warmup = 2 if device == "cuda" else 0  # on a CPU the check was the warm-up, and a call takes seconds
    bare_ms = {}
    for what, by_name in calls.items():
        by_name[BASES[what]]()
        times = with_ratios(times_by_round(by_name, device, rounds=rounds, warmup=warmup), BASES[what])
        bare_ms[BASES[what]] = times.pop(BASES[what])["ms"]
        for name, taken in times.items():
            rows[name][what] = taken
    clear(problem)
    return {"shape": case.describe(), "shares": shares(problem), "bare": bare_ms, "providers": rows}


def chosen(
    plans: Iterable[Plan], cases: Iterable[str], patterns: Iterable[str], *, peers: Iterable[str], memory: bool
) -> list[Plan]:
    """The plans that the options select; at least one."""
    found = [
        plan._replace(peers=tuple(peer for peer in plan.peers if peer in set(peers)), memory=plan.memory and memory)
        for plan in plans
        if plan.case.name.startswith(tuple(cases)) and plan.case.pattern in set(patterns)
    ]
    return found or sys.exit(f"no problem is named {' or '.join(cases)} with {' or '.join(patterns)}")


def sections(plans: list[Plan], device: str, *, rounds: int, seconds: float | None) -> Iterator[dict[str, Any]]:
    """The section "loss", after each step.

    Exits with an error at the end if a result of ours was wrong. Memory comes after the times of a case.
    """
    started = time.monotonic()
    section: dict[str, Any] = {
        "rounds": rounds,
        "copy_tb_per_s": copy_bandwidth(device, 2**30 if device == "cuda" else 2**26),
        "providers": {
            name: {"composition": p.composition, "ours": p.ours, "unavailable": p.unavailable(device)}
            for name, p in PROVIDERS.items()
        },
        "cases": {},
        "left_out": [],
    }

    def late() -> bool:
        return seconds is not None and time.monotonic() - started > seconds

    def so_far() -> dict[str, Any]:
        return section | {"seconds": round(time.monotonic() - started, 1)}

    for plan in plans:
        case = plan.case
        if late():
            section["left_out"].append(case.name)
            continue
        measured = measure(case, device, available(device, case.pattern, plan.peers), rounds=rounds)
        section["cases"][case.name] = measured
        print_case(case.name, measured)
        yield so_far()
        peaks.release(device)
        for name, row in measured["providers"].items() if plan.memory else ():
            if "not_timed" in row:
                continue
            row["memory_mib"] = {"failed": "no time was left"} if late() else peaks.of_call(case, name, device)
            peaks.release(device)
            print(f"{case.name}  {name}  peak memory in MiB {row['memory_mib']}", flush=True)
            yield so_far()
    yield so_far()
    bad = [
        f"{case}: {name}: {row['not_timed']}"
        for case, measured in section["cases"].items()
        for name, row in measured["providers"].items()
        if "not_timed" in row and PROVIDERS[name].ours
    ]
    if bad:
        sys.exit("a result of ours is wrong:\n" + "\n".join(bad))


def print_case(case: str, measured: dict[str, Any]) -> None:
    """One line a provider."""
    for name, row in measured["providers"].items():
        if "not_timed" in row:
            text = f"not timed: {row['not_timed']}"
        else:
            times = row["forward_backward"]
            text = f"{times['ms']['median']:9.1f} ms {times['times_bare']['median']:6.3f} x bare"
        print(f"{case}  {name:18} {text}", flush=True)
