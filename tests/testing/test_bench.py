"""The benchmark runner: the promised JSON, no timing of wrong sides, errors with the way out."""

import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from accel.testing import bench
from tests.ops.contract import needs_native

ROW_KEYS = {"case", "metric", "unit", "better", "ours", "peers", "limit", "target", "method"}


def make_case(**changes) -> bench.Case:
    fields = {
        "name": "sum 10",
        "num_bytes": 1000,
        "sides": {bench.OURS: lambda: sum(range(10)), "slow": lambda: sum(range(100000))},
        "check": lambda: None,
        "copy_bytes": 4096,
        "min_speedups": {"slow": 4.0, "absent": 9.0},
    }
    return bench.Case(**(fields | changes))


@pytest.fixture
def reused_pages(monkeypatch):
    """As if in the child process, so that `main` does not start one."""
    for key, value in bench.MALLOC_REUSE.items():
        monkeypatch.setenv(key, value)


def test_report(reused_pages, capsys):
    assert bench.main("sums", lambda quick: [make_case()], ["--json", "--quick"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"name", "commit", "machine", "rows"}
    assert {"cpu", "isa", "threads", "torch"} <= set(report["machine"])
    time, bandwidth = report["rows"]
    assert set(time) == set(bandwidth) == ROW_KEYS
    assert (time["unit"], time["better"]) == ("ms", "lower")
    assert (bandwidth["unit"], bandwidth["better"]) == ("GB/s", "higher")
    assert time["ours"] < time["target"] == pytest.approx(time["peers"]["slow"] / 4)
    assert bandwidth["target"] == pytest.approx(4 * bandwidth["peers"]["slow"])
    assert all(key in time["method"] for key in bench.MALLOC_REUSE)


def test_small_inputs_stay_where_they_are():
    small = torch.zeros(16)
    assert bench.input_sets(small) == [(small,)]


def test_large_inputs_are_rotated():
    x = torch.ones(bench.CACHED_BYTES // 4, requires_grad=True)
    sets = bench.input_sets(x, torch.zeros(1))
    assert sets[0][0] is x
    assert all(torch.equal(copy, x) and copy.requires_grad and copy.is_leaf for copy, _ in sets)
    assert not any(vector.requires_grad for _, vector in sets)
    assert len({copy.data_ptr() for copy, _ in sets}) == len(sets)
    assert sum(t.nbytes for tensors in sets for t in tensors) >= bench.ROTATED_BYTES


def test_rotation_takes_the_sets_in_turn_and_keeps_the_results_of_the_others():
    alive: list[int] = []

    class Result:
        def __init__(self, number: int):
            self.number = number
            alive.append(number)

        def __del__(self):
            alive.remove(self.number)

    call = bench._rotating(Result, [(0,), (1,), (2,)])
    for _ in range(5):
        call()
    assert sorted(alive) == [0, 1]  # the fourth and fifth calls; the sixth writes elsewhere


def test_the_copy_is_from_memory_where_the_inputs_are(reused_pages, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROTATED_BYTES", 1 << 20)
    case = make_case(sides={bench.OURS: range}, input_sets=[(1,), (2,)])
    bench.main("ranges", lambda quick: [case, make_case()], ["--json", "--quick"])
    rotated, _, same, _ = (row["method"] for row in json.loads(capsys.readouterr().out)["rows"])
    assert "calls going round 2 sets of inputs" in rotated
    assert "copy of 1048576 bytes" in rotated
    assert "on the same inputs" in same
    assert "copy of 4096 bytes" in same


def test_no_target_is_null(reused_pages, capsys):
    bench.main("sums", lambda quick: [make_case(min_speedups={})], ["--json", "--quick"])
    assert {row["target"] for row in json.loads(capsys.readouterr().out)["rows"]} == {None}


def test_target_is_the_strictest_wish(reused_pages, capsys):
    case = make_case(min_speedups={"slow": 4.0}, min_over_best=5.0, min_of_limit=1e-9)
    bench.main("sums", lambda quick: [case], ["--json", "--quick"])
    time, _ = json.loads(capsys.readouterr().out)["rows"]
    assert time["target"] == pytest.approx(time["peers"]["slow"] / 5)
    assert bench.verdict(time).endswith(" met")
    assert bench.verdict(time | {"ours": time["target"] * 1.1}).endswith("FALLS SHORT")


@pytest.mark.parametrize(
    ("ours", "peer", "limit", "target", "expected"),
    [
        (2.0, 5.0, 1.5, 2.0, "met"),
        (3.0, 5.0, 1.5, 2.0, "falls short"),
        (3.0, 5.0, None, 2.0, "falls short"),
        (3.0, 5.0, 2.5, 2.0, "falls short (beyond the limit)"),
        (3.0, 2.4, 2.5, 2.0, "falls short"),  # a peer is better than that limit
    ],
)
@pytest.mark.parametrize("better", ["lower", "higher"])
def test_a_target_beyond_what_is_possible_is_told_from_one_that_is_missed(
    ours: float, peer: float, limit: float | None, target: float, expected: str, better: str
) -> None:
    turn = (lambda x: x) if better == "lower" else (lambda x: x and 1 / x)
    row = bench.row(
        *("case", "metric", "unit"),
        {bench.OURS: turn(ours), "peer": turn(peer)},
        "method",
        better=better,
        limit=turn(limit),
        target=turn(target),
    )
    assert bench.outcome(row) == expected


@needs_native
def test_flops_are_held_against_a_matrix_product_and_memory_against_its_bound(reused_pages, capsys):
    case = make_case(
        num_bytes=0,
        copy_bytes=0,
        num_flops=2 * 64**3,
        gemm=(64, 64, 64),
        min_speedups={},
        min_of_limit=0.5,
        max_extra_bytes=1 << 20,
        sides={
            bench.OURS: lambda: torch.empty(1 << 18),
            "hungry": lambda: torch.empty(1 << 20),
        },
    )
    bench.main("sums", lambda quick: [case], ["--json", "--quick"])
    time, rate, memory = json.loads(capsys.readouterr().out)["rows"]
    assert rate["unit"] == "GFLOP/s"
    assert "torch.mm of 64x64 and 64x64 bfloat16" in rate["method"]
    assert time["target"] == pytest.approx(2 * time["limit"])
    assert memory["ours"] == pytest.approx(1, rel=0.01)
    assert memory["peers"]["hungry"] == pytest.approx(4, rel=0.01)
    assert memory["target"] == 1


@pytest.mark.parametrize("wrong", [{"num_flops": 1}, {"copy_bytes": 0}, {"num_bytes": 0}])
def test_a_case_has_one_limit(wrong):
    with pytest.raises(ValueError, match="sum 10: "):
        make_case(**wrong)


def test_wrong_side_is_not_timed(reused_pages, capsys):
    def wrong() -> None:
        raise AssertionError("y: error 3")

    case = make_case(check=wrong, sides={bench.OURS: lambda: pytest.fail("timed")})
    assert bench.main("sums", lambda quick: [case], []) == 1
    assert "sum 10: wrong result, not timed: y: error 3" in capsys.readouterr().err


def test_a_row_has_every_key_in_order():
    sides = {bench.OURS: 2.0, "slow": 8.0, "slower": 9.0}
    row = bench.row("sum 10", "time", "ms", sides, "once")
    assert row == {
        "case": "sum 10",
        "metric": "time",
        "unit": "ms",
        "better": "lower",
        "ours": 2.0,
        "peers": {"slow": 8.0, "slower": 9.0},
        "limit": None,
        "target": None,
        "method": "once",
    }
    other = bench.row("sum 10", "rate", "1/s", sides, "", better="higher", limit=1.0, target=4.0)
    assert list(other) == list(row)
    assert (other["better"], other["limit"], other["target"]) == ("higher", 1.0, 4.0)


def test_a_table_says_how_many_times_better_than_each_peer_we_are(capsys):
    def rows(quick: bool) -> list[dict]:
        sides = {bench.OURS: 2.0, "slow": 3.0, "slower": 9.0, "absent": 0.0}
        higher = bench.row("sum", "rate", "1/s", sides, "", better="higher")
        return [bench.row("sum", "time", "ms", sides, ""), higher]

    assert run_rows(rows) == 0
    time, rate = (line for line in capsys.readouterr().out.splitlines() if "is better" in line)
    assert time.endswith(
        "accel         2  slow         3 (1.50x)  slower         9 (4.50x)  absent         0"
    )
    assert "slow         3 (0.67x)  slower         9 (0.22x)  absent" in rate
    shares = bench.row("sum", "time in a share", "%", {bench.OURS: 2.0, "slow": 3.0}, "")
    assert bench.advantage(shares, 3.0) == ""


def run_rows(rows, *flags: str) -> int:
    return bench.run_rows("sums", rows, bench.parser("sums").parse_args(flags))


def test_rows_that_a_benchmark_made_are_reported(capsys):
    def rows(quick: bool) -> list[dict]:
        return [bench.row("sum", "time", "ms", {bench.OURS: 1.0 + quick}, "by hand", target=1.0)]

    assert run_rows(rows, "--json", "--quick") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["name"] == "sums"
    assert report["rows"] == rows(True)
    assert run_rows(rows) == 0
    assert "sum: by hand" in capsys.readouterr().out


def test_what_is_printed_while_rows_are_made_is_not_among_the_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rows(quick: bool) -> list[dict]:
        logging.StreamHandler(sys.stdout).emit(logging.makeLogRecord({"msg": "said by Megatron"}))
        return []

    assert run_rows(rows, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"] == []
    assert "said by Megatron" in err


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no ranks"), ValueError("no loss"), subprocess.CalledProcessError(1, "torchrun")],
)
def test_rows_that_could_not_be_made_are_one_line(error, capsys):
    def rows(quick: bool) -> list[dict]:
        raise error

    assert run_rows(rows, "--json") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"accel bench sums: {error}\n"


def test_unknown_name_lists_the_known(capsys):
    assert bench.run("rmsnorm") == 2
    assert "no benchmark 'rmsnorm'; expected one of: " in capsys.readouterr().err


def test_outside_a_checkout(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    assert bench.run("rms_norm") == 2
    assert f"{tmp_path} is no accel checkout" in capsys.readouterr().err


@needs_native
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_quick_run_of_the_norms(name, capfd):
    environment = dict(os.environ)
    assert bench.run(name, json=True, quick=True) == 0
    assert json.loads(capfd.readouterr().out)["name"] == name
    assert dict(os.environ) == environment


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_benchmark_lets_it_take_down_what_it_started(tmp_path, end):
    source = """
import pathlib, sys, time
from accel.testing import bench

def rows(quick):
    try:
        pathlib.Path("begun").touch()
        time.sleep(600)
    finally:
        pathlib.Path("taken down").touch()

sys.exit(bench.run_rows("slow", rows, bench.parser("slow").parse_args()))
"""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "slow.py").write_text(source)
    program = (
        "import pathlib, signal, sys; from accel.testing import bench; "
        f"signal.signal({end:d}, signal.SIG_DFL); "  # may be ignored here, as nohup has it
        "bench.CHECKOUT = pathlib.Path(sys.argv[1]); sys.exit(bench.run('slow'))"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path]) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(end)
        assert process.wait(timeout=300) == 128 + signal.SIGTERM
    assert (tmp_path / "taken down").exists()


def test_a_commit_is_dirty_by_what_a_result_depends_on(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    assert bench.commit() is None
    files = [tmp_path / name for name in ("op.py", "benchmarks/results/x/op.json", "docs/op.md")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    clean = bench.commit()
    assert clean is not None
    assert len(clean) == 40
    for file in files[1:]:
        file.write_text("again")
    assert bench.commit() == clean
    files[0].write_text("again")
    assert bench.commit() == f"{clean}-dirty"
