"""``python -m accel``: finding a command, refusing a wrong one, starting fast."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.cli import COMMANDS, main, tables, versions
from accel.testing import bench

CHECKOUT = Path(accel.__file__).parent.parent


def bare_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """This Python with accel alone: no site-packages, no environment."""
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env={"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_help_and_version_need_nothing_but_python() -> None:
    done = bare_python(
        "-c",
        "import sys; from accel.cli import main; main(['--help']); main(['--version'])\n"
        "print({m.partition('.')[0] for m in sys.modules} & {'torch', 'rich', 'packaging'})",
    )
    assert done.stderr == ""
    assert done.stdout.endswith(f"accel {accel.__version__}\nset()\n")
    assert all(f"\n  {command} " in done.stdout for command in COMMANDS)


def test_without_a_command_there_is_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m accel COMMAND")


@pytest.mark.parametrize(
    ("word", "answer"),
    [("docter", "did you mean doctor?"), ("patch", "did you mean patches?"), ("x", "use doctor,")],
)
def test_unknown_command(word: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert answer in err


@pytest.mark.parametrize("command", ["features", "patches", "bench"])
def test_command_without_torch_points_at_the_doctor(command: str) -> None:
    done = bare_python("-m", "accel", command, *["rms_norm"][: command == "bench"])
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(
        rf"accel {command}: No module named '\w+'; see python -m accel doctor\n", done.stderr
    )


@pytest.mark.parametrize("command", ["doctor", "features", "patches", "bench"])
def test_misspelt_flag_is_one_line_with_the_nearest(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, *["rms_norm"][: command == "bench"], "--jsn"])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"python -m accel {command}: unknown argument --jsn; did you mean --json?\n"


def test_bench_forwards_flags_and_status(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def run(name: str, *, json: bool = False, quick: bool = False) -> int:
        called.append((name, json, quick))
        return 7

    monkeypatch.setattr(bench, "run", run)
    assert main(["bench", "rms_norm", "--quick"]) == 7
    assert main(["bench", "rms_norm", "--json"]) == 7
    assert called == [("rms_norm", False, True), ("rms_norm", True, False)]


def test_bench_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_reader_that_stops_early_gets_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-S", "-m", "accel", "doctor"],
        env={"PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(timeout=600)


def test_plain_table_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "x" * 500
    tables.show([{"name": "a", "why": wide}, {"name": "", "why": "b"}], [("name", "why")])
    assert capsys.readouterr().out == f"name  why\na     {wide}\n-     b\n"


def test_table_on_a_terminal_wraps_and_takes_brackets_literally(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(os.environ, "COLUMNS", "40")
    tables.show([{"name": "[red]", "why": "word " * 20}], [("name",), ("why",)])
    lines = capsys.readouterr().out.splitlines()
    assert any("[red]" in line for line in lines)
    assert all(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= 40 for line in lines)
    assert sum(line.count("word") for line in lines) == 20


@pytest.mark.parametrize("module", [tables, versions])
def test_examples_in_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
