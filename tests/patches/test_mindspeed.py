"""Command lines that were written for MindSpeed: what is translated, and what a line says of the rest."""

from __future__ import annotations

import argparse
import re

import pytest

from accel.patches import _mindspeed, command_line


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    monkeypatch.setattr(command_line, "_PARSED", {})
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if "--accel-preset" not in parser._option_string_actions:  # nobody has imported the adaptor
        command_line.add_options(parser)
    return parser


def test_no_flag_is_told_of_that_there_is(parser: argparse.ArgumentParser) -> None:
    assert not _mindspeed.INSTEAD.keys() & parser._option_string_actions.keys()
    assert _mindspeed.ALIASES.keys() <= parser._option_string_actions.keys()


def test_what_is_named_instead_exists(parser: argparse.ArgumentParser) -> None:
    named = {flag for text in _mindspeed.INSTEAD.values() for flag in re.findall(r"--[\w-]+", text)}
    assert len(named) > 20
    assert named <= parser._option_string_actions.keys()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_line_each_then_what_the_parser_does(
    rank: str,
    parser: argparse.ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    told = [
        f"accel: {flag} is MindSpeed's: {_mindspeed.INSTEAD[flag]}"
        for flag in ("--moe-fb-overlap", "--coc-mode")
    ]
    unknown = ["--moe-fb-overlap", "--coc-mode=2", "--moe-fb-overlap"]
    words = ["--use-ascend-coc", *unknown]
    args, rest = parser.parse_known_args(words)
    assert args.accel_tp_overlap
    assert rest == unknown
    assert capsys.readouterr().err.splitlines() == (told if rank == "0" else [])
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith(
        "unrecognized arguments: --moe-fb-overlap --coc-mode=2 --moe-fb-overlap"
    )
    assert [line for line in lines if line.startswith("accel: ")] == (told if rank == "0" else [])


def test_a_flag_that_the_program_has_is_its_own(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    parser.add_argument("--tp-x", type=int)
    assert parser.parse_args(["--tp-x", "2"]).tp_x == 2
    assert capsys.readouterr().err == ""
