"""`python -m grpo_fused doctor`: what runs on this machine, and what does not, and why."""

from __future__ import annotations

import argparse

from grpo_fused import doctor


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m grpo_fused", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="which engines and extensions run here; what is missing and what it would bring")
    parser.parse_args()
    print(doctor.report())


if __name__ == "__main__":
    main()
