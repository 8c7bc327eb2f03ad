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
    taken = _mindspeed.ALIASES.keys() | _mindspeed.TRANSLATED.keys()
    assert taken <= parser._option_string_actions.keys()


def test_what_is_named_instead_exists(parser: argparse.ArgumentParser) -> None:
    texts = (*_mindspeed.INSTEAD.values(), *_mindspeed.TRANSLATED.values())
    named = {flag for text in texts for flag in re.findall(r"--[\w-]+", text)}
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


CP4 = "--context-parallel-size 4"
ALGO = "--context-parallel-algo"


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (f"{ALGO} megatron_cp_algo", "--cp-comm-type p2p"),
        (f"{ALGO}=kvallgather_cp_algo", "--cp-comm-type all_gather"),
        (f"{ALGO} ulysses_cp_algo --cp-comm-type p2p", "--cp-comm-type a2a"),
        (
            f"--ulysses-degree-in-cp 2 {CP4} {ALGO} hybrid_cp_algo",
            f"{CP4} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        ),
        ("--context-parallel-kv-cache-policy half", "--accel-context-parallel-keep keys"),
        ("--context-parallel-kv-cache-policy full", "--accel-context-parallel-keep all"),
        ("--attention-mask-type causal", ""),
        ("--balanced-moe-hot-expert-num 7 --balanced-moe-experts", "--accel-hot-experts 7"),
        ("--balanced-moe-experts", "--accel-hot-experts"),
    ],
)
def test_words_are_those_of_flags_here(
    words: str, same: str, parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    found = parser.parse_args(words.split())
    said = capsys.readouterr().err.splitlines()
    assert found == parser.parse_args(same.split())
    told = same.replace(f"{CP4} ", "")
    assert said == ([f"accel: {ALGO}: {told}"] if ALGO in words else [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{ALGO} ring", f"{ALGO} ring: use megatron_cp_algo, .* or Megatron's --cp-comm-type"),
        (f"{ALGO} hybrid_cp_algo", "hybrid_cp_algo need each other"),
        (f"{ALGO} ulysses_cp_algo --ulysses-degree-in-cp 2", "hybrid_cp_algo need each other"),
        (
            f"{ALGO} hybrid_cp_algo --ulysses-degree-in-cp two",
            "--ulysses-degree-in-cp: 'two' is no",
        ),
        (
            f"{CP4} {ALGO} hybrid_cp_algo --ulysses-degree-in-cp 3",
            "--ulysses-degree-in-cp 3 does not divide --context-parallel-size 4: use one of 1, 2, 4$",
        ),
        (
            f"{ALGO} ulysses_cp_algo --yaml-cfg run.yaml",
            "in whose place --yaml-cfg is: set cp_comm_type: a2a there",
        ),
        ("--attention-mask-type general", "--attention-mask-type general: .*; use causal$"),
        (
            "--balanced-moe-hot-expert-num 7",
            "--balanced-moe-hot-expert-num 7 does nothing without --balanced-moe-experts",
        ),
    ],
)
def test_words_that_mean_nothing_here_are_an_error(
    words: str, message: str, parser: argparse.ArgumentParser
) -> None:
    with pytest.raises(ValueError, match=message):
        parser.parse_args(words.split())
