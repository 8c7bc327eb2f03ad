"""An argument parser that says what is wrong in one line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from accel.cli import COMMANDS

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """The parser of ``python -m accel COMMAND``; every command takes ``--json``."""

    def __init__(self, command: str) -> None:
        super().__init__(
            prog=f"python -m accel {command}", description=COMMANDS[command], allow_abbrev=False
        )
        self.add_argument("--json", action="store_true", help="print JSON and nothing else")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """As ``parse_args``, but an unknown flag is answered with the nearest one that exists."""
        args, unknown = self.parse_known_args(list(argv))
        if unknown:
            word = unknown[0].partition("=")[0]
            known = [s for action in self._actions for s in action.option_strings]
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            self.error(f"unknown argument {word}; {hint}")
        return args

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")
