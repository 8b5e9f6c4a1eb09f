"""One problem, many providers: each result checked against float64, then timed in turns with the bare products.

The CPU and GPU programs share `measure`; `run` goes through a list of problems and updates the run's file. The row of a
provider has its errors, and its times or the reason that there are none.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import torch

from benchmarks import memory, results
from benchmarks.exact import Exact, wrong
from benchmarks.problem import DTYPES, Case, clear, shares
from benchmarks.providers import PEERS, PROVIDERS, Provider, available
from benchmarks.timing import Calls, bare_gemms, copy_bandwidth, times_by_round, with_ratios
from grpo_fused.testing import Problem

BASES = {"forward": "bare-1", "forward_backward": "bare-3", "scoring": "bare-1"}
"""The calls that are timed, and the bare products for comparison."""


class Plan(NamedTuple):
    """A problem and its providers."""

    case: Case
    peers: tuple[str, ...] = PEERS
    memory: bool = True


def call_of(provider: Provider, what: str, problem: Problem) -> Callable[[], object]:
    """The loss without gradient, the loss with its gradients, or the log-probs without gradient."""
    if what == "forward_backward":

        def train() -> None:
            clear(problem)
            provider.loss(problem).backward()

        return train
    function = provider.loss if what == "forward" else provider.logps
    assert function is not None

    def without_gradient() -> None:
        with torch.no_grad():
            function(problem)

    return without_gradient


def check(provider: Provider, problem: Problem, exact: Exact) -> dict[str, float]:
    """Errors of the loss, its gradients and the log-probs. Every path that is timed is called once."""
    clear(problem)
    loss = provider.loss(problem)
    loss.backward()
    errors = {"loss": exact.loss_error(loss), **exact.gradient_errors(problem)}
    clear(problem)
    if provider.logps is not None:
        with torch.no_grad():
            errors["logp"] = exact.logp_error(provider.logps(problem), problem)
    return errors


def measure(
    case: Case, device: str, providers: dict[str, Provider], *, rounds: int, warmup: int | None = None
) -> dict[str, Any]:
    """Errors, times and ratios of forward + backward and of scoring."""
    torch.compiler.reset()  # or the compilations of other shapes count towards this one's limit
    problem = case.problem(device)
    exact = Exact.of(problem)
    bare = bare_gemms(case.N, case.H, case.V, DTYPES[case.dtype], device)
    calls: dict[str, Calls] = {what: {BASES[what]: bare[BASES[what]]} for what in ("forward_backward", "scoring")}
    rows: dict[str, dict[str, Any]] = {}
    for name, provider in providers.items():
        rows[name] = row = {}
        try:
            row["errors"] = check(provider, problem, exact)
            row["not_timed"] = wrong(row["errors"], problem.hidden_states.dtype, ours=provider.ours)
        except Exception as error:  # a peer may fail in any way; the others are still measured
            row["not_timed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        release(device)
        if row["not_timed"] is None:
            del row["not_timed"]
            calls["forward_backward"][name] = call_of(provider, "forward_backward", problem)
            if provider.logps is not None:
                calls["scoring"][name] = call_of(provider, "scoring", problem)
    if warmup is None:
        warmup = 2 if device == "cuda" else 0  # on a CPU the check was the warm-up, and a call takes seconds
    found: dict[str, Any] = {"shape": case.describe(), "shares": shares(problem), "bare": {}, "providers": rows}
    for what, these in calls.items():
        these[BASES[what]]()
        times = with_ratios(times_by_round(these, device, rounds=rounds, warmup=warmup), BASES[what])
        found["bare"][BASES[what]] = times.pop(BASES[what])["ms"]
        for name, taken in times.items():
            rows[name][what] = taken
    clear(problem)
    return found


def release(device: str) -> None:
    """Free cached memory, so that a provider starts as in a fresh process."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def add_options(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """The options of both programs."""
    parser.add_argument("--cases", nargs="*", default=[""], help="prefixes of names; default all")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--small", action="store_true", help="one small problem, to test the program")
    parser.add_argument("--no-peers", action="store_true", help="ours and the bare products only")
    parser.add_argument("--no-memory", action="store_true", help="no fresh processes for peak memory")
    parser.add_argument("--seconds", type=float, help="start nothing new after this")
    parser.add_argument("--out", type=Path, help="file of the run; default a new one (see benchmarks.results)")


def chosen(plans: Iterable[Plan], given: argparse.Namespace) -> list[Plan]:
    """The plans that the options select."""
    return [
        plan._replace(peers=() if given.no_peers else plan.peers, memory=plan.memory and not given.no_memory)
        for plan in plans
        if plan.case.name.startswith(tuple(given.cases))
    ]


def command(module: str, arguments: list[str]) -> str:
    """The command that repeats the run, without its output file."""
    kept = [word for i, word in enumerate(arguments) if "--out" not in (word, *arguments[i - 1 : i])]
    return shlex.join(["python", "-m", module, *kept])


def run(program: str, plans: list[Plan], device: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure all into the section "loss" of the run's file; returns the section.

    Exits with an error at the end if a result of ours was wrong. On a GPU memory is measured after all times, which are
    more important; on a CPU after each case's times, since a case takes minutes.
    """
    results.machine(device)  # reads the load before this program adds to it
    out = given.out or (Path(mkdtemp()) / "small.json" if given.small else results.new_path(device))
    started = time.monotonic()
    section: dict[str, Any] = {
        "command": program,
        "rounds": given.rounds,
        "copy_tb_per_s": copy_bandwidth(device, 2**30 if device == "cuda" else 2**26),
        "providers": {
            name: {"composition": p.composition, "ours": p.ours, "unavailable": p.unavailable(device)}
            for name, p in PROVIDERS.items()
        },
        "cases": {},
        "left_out": [],
    }

    def late() -> bool:
        return given.seconds is not None and time.monotonic() - started > given.seconds

    def save() -> None:
        section["seconds"] = round(time.monotonic() - started, 1)
        results.record("loss", section, out=out, device=device)

    def weigh(plan: Plan) -> None:
        rows = section["cases"].get(plan.case.name, {"providers": {}})["providers"]
        for name in (name for name in rows if plan.memory and "not_timed" not in rows[name]):
            if late():
                rows[name]["memory_mib"] = {"failed": "no time was left"}
            else:
                rows[name]["memory_mib"] = memory.in_fresh_process(plan.case, name, device, timeout_s=300)
            print(f"{plan.case.name}  {name}  peak memory in MiB {rows[name]['memory_mib']}", flush=True)
            save()

    for plan in plans:
        case = plan.case
        if late():
            section["left_out"].append(case.name)
            continue
        found = measure(case, device, available(device, case.pattern, plan.peers), rounds=given.rounds)
        section["cases"][case.name] = found
        print_case(case.name, found)
        save()
        release(device)
        if device == "cpu":
            weigh(plan)
    for plan in plans if device == "cuda" else ():
        weigh(plan)
    save()
    print(f"written to {out}")
    bad = [
        f"{case}: {name}: {row['not_timed']}"
        for case, found in section["cases"].items()
        for name, row in found["providers"].items()
        if "not_timed" in row and PROVIDERS[name].ours
    ]
    if bad:
        sys.exit("a result of ours is wrong:\n" + "\n".join(bad))
    return section


def print_case(name: str, found: dict[str, Any]) -> None:
    """One line a provider."""
    print(f"{name}  " + "  ".join(f"{bare} {ms['median']:.1f} ms" for bare, ms in found["bare"].items()))
    for provider, row in found["providers"].items():
        errors = "  ".join(f"{key} {value:.1e}" for key, value in row.get("errors", {}).items())
        if "not_timed" in row:
            print(f"  {provider:18} not timed: {row['not_timed']}  {errors}")
            continue
        times = "  ".join(
            f"{what} {row[what]['ms']['median']:9.1f} ms {row[what]['times_bare']['median']:6.3f} x bare"
            for what in ("forward_backward", "scoring")
            if what in row
        )
        print(f"  {provider:18} {times}  {errors}", flush=True)
