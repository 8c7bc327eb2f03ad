"""The command line, ``python -m accel COMMAND``.

One module for each command, imported when it is asked for: ``--help`` and ``--version`` import no
torch. A command is a function ``main(argv) -> exit status``. Results go to stdout, everything else
to stderr. Status 0: all is well; 1: something must be fixed; 2: the command line is wrong, said in
one line.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

import accel

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "doctor": "what is installed here, what is wrong with it and how to fix it",
    "features": "every feature: its flag, the preset that turns it on, its limits",
    "patches": "every patch, its contract, and whether it fits the installed Megatron",
    "bench": "run one benchmark of a checkout and compare with its peers",
    "schedule": "a pipeline schedule: check it, time it, draw it, compare it with Megatron's",
}


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    first, rest = (argv[0], argv[1:]) if argv else ("--help", ())
    if first in ("-h", "--help"):
        print(_help())
        return 0
    if first == "--version":
        print(f"accel {accel.__version__}")
        return 0
    if first not in COMMANDS:
        near = difflib.get_close_matches(first, COMMANDS, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"use {', '.join(COMMANDS)}"
        print(f"accel: there is no command {first!r}; {hint}", file=sys.stderr)
        return 2
    try:
        status: int = importlib.import_module(f"accel.cli.{first}").main(rest)
    except ModuleNotFoundError as error:
        print(f"accel {first}: {error}; see python -m accel doctor", file=sys.stderr)
        return 1
    return status


def _help() -> str:
    commands = "\n".join(f"  {name:<9} {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: python -m accel COMMAND [--json] [--help]\n"
        f"       python -m accel --version\n\n{commands}\n\n"
        "In a training script: import accel.megatron_adaptor"
    )
