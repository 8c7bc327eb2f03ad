"""`python -m accel schedule`: figures beside Megatron's, files that are read again, bad input in one line."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from accel.cli import main
from accel.parallel.schedule.names import NAMED

FOUR_RANKS = ["--pp", "4", "--vpp", "2", "--microbatches", "16"]


def figures(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict]:
    assert main(["schedule", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_chunk_is_1f1b_and_compared_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = figures(capsys, "--pp", "4", "--microbatches", "8")
    assert found["bubble"] == 3 * (1 + 2)
    assert found["makespan"] == 8 * 3 + found["bubble"]
    assert [rank["in_flight"] for rank in found["ranks"]] == [4, 3, 2, 1]


def test_more_warm_up_stands_beside_megatrons(capsys: pytest.CaptureFixture[str]) -> None:
    ours, stock = figures(capsys, *FOUR_RANKS, "--extra-warmup", "1")
    assert stock["schedule"] == "Megatron's"
    assert "1 more in warm-up" in ours["schedule"]
    assert ours["ranks"][0]["in_flight"] == stock["ranks"][0]["in_flight"] + 1
    assert ours["bubble"] == stock["bubble"]


@pytest.mark.parametrize("name", NAMED)
def test_each_schedule_is_timed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ours, stock = figures(capsys, "--schedule", name, "--pp", "4", "--microbatches", "16")
    assert ours["schedule"] == name
    chunks = NAMED[name].chunks
    for found in (ours, stock):
        assert {rank["busy"] for rank in found["ranks"]} == {chunks * 16 * 3.0}
    assert name in ("v-half", "v-min") or ours["bubble"] < stock["bubble"]


def test_transfers_that_block_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--transfer", "0.25", "--latency", "0.25"]
    (free,) = figures(capsys, *FOUR_RANKS, *link)
    (blocked,) = figures(capsys, *FOUR_RANKS, *link, "--blocking")
    assert blocked["makespan"] > free["makespan"]
    assert blocked["ranks"][0]["exposed"] > free["ranks"][0]["exposed"]


def test_text_has_a_row_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *FOUR_RANKS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("interleaved: ")
    assert [line.split()[0] for line in lines[1:]] == ["rank", "0", "1", "2", "3"]


def test_written_schedules_are_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    written, _ = figures(capsys, *FOUR_RANKS, "--extra-warmup", "1", "--write", str(path))
    (read,) = figures(capsys, "--read", str(path))
    assert read["schedule"] == "mine.json"
    assert read["ranks"] == written["ranks"]
    data = json.loads(path.read_text())
    data["ranks"][1].remove(["receive_forward", 0, 0])
    path.write_text(json.dumps(data))
    assert "rank 1" in refused(["--read", str(path)], capsys)


@pytest.mark.parametrize("name", ["s.svg", "s.png", "s.json"])
def test_pictures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    figures(capsys, *FOUR_RANKS, "--render", str(path))
    if name == "s.svg":
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    elif name == "s.png":
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    else:
        computed = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("tid") == 0]
        assert sum(e["ph"] == "X" for e in computed) == 4 * 2 * 16 * 2


def refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["schedule", *flags])
    assert ended.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pp", "0"], "p must be a whole number, at least 1, got 0"),
        (["--vpp", "0"], "v must be .* got 0"),
        (["--vpp", "2", "--microbatches", "3"], "m = 3.* m of 4 or more would work"),
        (["--extra-warmup", "1"], "are for --vpp 2 or more"),
        (["--vpp", "2", "--extra-warmup", "-1"], "0 or more, got -1"),
        (["--schedule", "zb-v", "--vpp", "3"], "--vpp 3: --schedule zb-v has --vpp 2"),
        (["--schedule", "dualpipev", "--microbatches", "7"], "p = 4, m = 7"),
        (["--schedule", "zb"], "invalid choice: 'zb'"),
        (["--forward", "-1"], "forward must be .* got -1.0"),
        (["--weight", "9"], "weight 9.0 is over backward 2.0"),
        (["--render", "x.gif"], "--render x.gif: use a name that ends in .png, .svg, .json"),
        (["--read", "nowhere.json"], "nowhere.json"),
        (["--microbatch", "7"], "did you mean --microbatches"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(message, refused(flags, capsys))


def test_a_file_that_is_no_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.json"
    for text, message in (("no", "is no JSON"), ("{}", "a schedule has the keys num_ranks")):
        path.write_text(text)
        assert message in refused(["--read", str(path)], capsys)
