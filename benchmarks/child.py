"""A function in a process of its own, for peaks of memory and for settings that hold for a whole process.

    python -m benchmarks.child benchmarks.end_to_end:memory '["ours", {}]'

Arguments and result are JSON; the result is the last line that it prints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pkgutil import resolve_name
from typing import Any

from benchmarks.results import ROOT


class ChildError(RuntimeError):
    """Why a process failed, and its exit status."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


def in_child(function: str, *arguments: Any, timeout_s: float | None = None, **environment: str) -> Any:
    """The result of `module:function`, which is JSON too.

    Raises:
        subprocess.TimeoutExpired: It took longer.
        ChildError: It failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.child", function, json.dumps(arguments)], cwd=ROOT,
        env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=timeout_s,
    )  # fmt: skip
    if done.returncode:
        raise ChildError(f"{function}{arguments} failed: {done.stderr[-2000:]}", done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(resolve_name(sys.argv[1])(*json.loads(sys.argv[2]))))
