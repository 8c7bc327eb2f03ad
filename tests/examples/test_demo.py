"""The parts of the demo that train nothing: corpus, log parsing, figures, report."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
MODULES = ("corpus", "measure", "report", "training", "run")

LOG = """\
INFO:accel:megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__ -> accel.patches.norm:new_norm
INFO:accel:megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__ -> accel.patches.norm:new_norm
[accel] device cpu (asked for) | megatron-core 0.19.2 | preset fast | 1 patch
[accel] transformer_engine is not installed: --transformer-impl local is used instead
[accel]   norm                          active    preset
[accel]   host_bf16_gemm                idle      preset: this CPU multiplies bf16 natively
 [2026-11-21 05:00:00.0] iteration        1/      40 | consumed samples:            8 | \
elapsed time per iteration (ms): {first} | learning rate: 1.000000E-03 | global batch size:     8 | \
lm loss: 8.300000E+00 | loss scale: 1.0 | grad norm: 0.903 | number of skipped iterations:   0 |
[Rank 1] (after 1 iterations) memory (MB) | allocated: 1.62 | max allocated: 1.50 | reserved: 1.62
[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.62 | max allocated: 2.00 | reserved: 1.62
"""


@pytest.fixture(scope="module")
def demo() -> SimpleNamespace:
    """The demo's modules; they import each other as scripts in one folder do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEMO))
        loaded = {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        del sys.modules[name]
    return SimpleNamespace(**loaded)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stdlib")
    (folder / "b.py").write_text("def b():\n    return 'ä'\n" * 20)
    (folder / "a").mkdir()
    (folder / "a" / "c.py").write_text("import os\n" * 20)
    (folder / "latin.py").write_bytes(b"# \xe4\n")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "foreign.py").write_text("foreign = 1\n")
    return folder


def make_run(measure: ModuleType, rows: list[tuple[int, float]], seconds=(), peak: int = 100):
    intervals = [measure.Interval(*row) for row in rows]
    peaks = {0: peak, 1: peak + 1}
    return measure.Run(intervals=intervals, seconds=list(seconds), peak_bytes=peaks)


@pytest.fixture(scope="module")
def comparison(demo: SimpleNamespace):
    # Turns of 2 steps; the first two turns are the warm-up.
    seconds = [9.0, 9.0, 8.0, 8.0, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 0.1, 0.1]

    def side(speed: float, shift: float, peak: int):
        rows = [(1, 8.0 + shift), (10, 7.0 + shift), (20, 6.0 + shift)]
        return make_run(demo.measure, rows, [s / speed for s in seconds], peak)

    return demo.measure.compare(side(1, 0, 100), side(2, 0.25, 50), 1000, 2)


@pytest.fixture(scope="module")
def report(demo: SimpleNamespace, comparison, tmp_path_factory: pytest.TempPathFactory):
    data = demo.corpus.Corpus(
        tmp_path_factory.mktemp("data"),
        {"num_files": 2, "num_bytes": 9, "num_tokens": 3, "recipe": {"python": "3.12"}},
    )
    parsed = demo.measure.parse(LOG.format(first="9.0").splitlines())
    runs = {"stock": parsed, "accel": parsed}
    samples = ["def f(x):\n    return x < 1 & 2"]
    step = {
        "weights": 1 << 20,
        "gradients": [0, 0, 1 << 20],
        "rest": [5, 3 << 20, 7],
        "backward": 2,
    }
    memory = {"shape": "2 layers", "stock": step, "accel": step}
    return demo.run.make_report(demo.training.Plan(), data, runs, comparison, samples, memory)


def test_corpus_is_every_readable_file_in_order_and_reads_back(demo, source, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from transformers import AutoTokenizer

    recipe = demo.corpus.Recipe(str(source), "3.12", vocab_size=300)
    built = demo.corpus.build(recipe, tmp_path / "data")
    tokenizer = AutoTokenizer.from_pretrained(built.tokenizer)
    documents = IndexedDataset(str(built.prefix))
    texts = [tokenizer.decode(document) for document in documents]
    end = demo.corpus.END_OF_TEXT
    expected = [source / "a" / "c.py", source / "b.py"]
    assert texts == [path.read_text() + end for path in expected]
    assert all(document[-1] == tokenizer.eos_token_id for document in documents)
    assert built.manifest["num_tokens"] == sum(len(d) for d in documents)
    assert len(tokenizer) <= 300
    assert documents[0].dtype == np.uint16


def test_corpus_is_built_once_and_again_when_its_recipe_changes(demo, source, tmp_path):
    folder = tmp_path / "data"
    recipe = demo.corpus.Recipe(str(source), "3.12", vocab_size=300)
    demo.corpus.build(recipe, folder)
    made = (folder / "stdlib.bin").stat().st_mtime_ns
    demo.corpus.build(recipe, folder)
    assert (folder / "stdlib.bin").stat().st_mtime_ns == made
    other = demo.corpus.Recipe(str(source), "3.13", vocab_size=300)
    assert demo.corpus.build(other, folder).manifest["recipe"]["python"] == "3.13"
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_an_interrupted_build_leaves_nothing(demo, source, tmp_path, monkeypatch):
    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.corpus, "_write", interrupted)
    recipe = demo.corpus.Recipe(str(source), "3.12", vocab_size=300)
    with pytest.raises(KeyboardInterrupt):
        demo.corpus.build(recipe, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_python_is_an_error(demo, tmp_path):
    with pytest.raises(ValueError, match=r"no \.py files below"):
        demo.corpus.build(demo.corpus.Recipe(str(tmp_path), "3.12"), tmp_path / "data")


def test_parse_reads_losses_memory_and_the_start_up_table(demo):
    parsed = demo.measure.parse(LOG.format(first="738.6").splitlines())
    assert parsed.intervals == [demo.measure.Interval(1, 8.3)]
    assert parsed.peak_bytes == {0: 2 << 20, 1: 3 << 19}
    assert parsed.head.startswith("cpu (asked for) | megatron-core 0.19.2")
    assert parsed.notes == [
        "transformer_engine is not installed: --transformer-impl local is used instead"
    ]
    assert [(f["name"], f["state"]) for f in parsed.features] == [
        ("norm", "active"),
        ("host_bf16_gemm", "idle"),
    ]
    assert parsed.features[1]["asked"] == "preset: this CPU multiplies bf16 natively"
    assert [p["replacement"] for p in parsed.patches] == ["accel.patches.norm:new_norm"]


def test_parse_of_what_two_ranks_wrote_into_one_line(demo):
    joined = LOG.format(first="738.6").replace("1.62\n[Rank 0]", "1.62[Rank 0]")
    assert joined.count("\n") == LOG.count("\n") - 1
    assert demo.measure.parse(joined.splitlines()).peak_bytes == {0: 2 << 20, 1: 3 << 19}


def test_parse_counts_the_parameters_of_each_rank_once(demo):
    old = " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 7\n"
    new = (
        " > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank (0, 0, 1): 5"
    )
    run = demo.measure.parse([old, new + old.rstrip("\n"), new])
    assert run.num_parameters == {"(1, 0)": 7, "(0, 0, 1)": 5}


def test_parse_reads_the_table_that_accel_prints(demo):
    from accel.start_up import table

    feature = {"asked": "flag", "state": "active", "reason": ""}
    status = {
        "device": "cpu",
        "device_reason": "asked for",
        "megatron": "0.19.2",
        "preset": "off",
        "features": {"fused_norm": feature},
        "patches": [1, 2],
    }
    parsed = demo.measure.parse(table(status, ["a note"]).splitlines())
    assert parsed.features == [{"name": "fused_norm", "state": "active", "asked": "flag"}]
    assert parsed.notes == ["a note"]
    assert parsed.head


def test_figures_pair_the_turns_and_leave_out_the_warm_up(comparison):
    assert comparison.tokens_per_second == pytest.approx(
        {"stock": 1000 / 0.15, "accel": 2000 / 0.15}
    )
    assert comparison.ratio.median == pytest.approx(2)
    assert comparison.ratio.num_turns == 4
    assert comparison.iterations == [1, 10, 20]
    assert comparison.max_loss_difference == pytest.approx(0.25)
    assert comparison.to_json()["peak_memory_bytes"] == {"stock": 201, "accel": 101}


@pytest.mark.parametrize(("spread", "cautious"), [(0.02, False), (0.4, True)])
def test_a_busy_machine_is_said(demo, report, spread, cautious):
    page = demo.report.to_html({**report, "speedup_spread": spread})
    assert ("do not trust the ratio" in page) == cautious


def test_sides_that_do_not_match_are_an_error(demo):
    rows, seconds = [(1, 8.0), (10, 7.0), (20, 6.0)], [1.0] * 10
    stock = make_run(demo.measure, rows, seconds)
    for other, steps in (
        ([*rows[:2], (30, 6.0)], seconds),
        ([*rows[:2], (20, float("nan"))], seconds),
        (rows[:2], seconds),
        (rows, seconds[:8]),
    ):
        with pytest.raises(ValueError, match=r"iterations|finite|at least 3 are needed|shorter"):
            demo.measure.compare(stock, make_run(demo.measure, other, steps), 1000, 2)


def test_report_json_has_the_promised_keys(report):
    again = json.loads(json.dumps(report))
    for key in ("tokens_per_second", "peak_memory_bytes"):
        assert set(again[key]) == {"stock", "accel"}
    assert set(again["losses"]) == {"iteration", "stock", "accel", "difference"}
    assert again["max_loss_difference"] == pytest.approx(0.25)
    assert again["speedup"] == pytest.approx(2)
    assert again["patches"]
    assert again["machine"]["torch"]


def test_html_is_well_formed_and_self_contained(demo, report):
    page = demo.report.to_html(report)
    ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    assert "x &lt; 1 &amp; 2" in page
    assert "prefers-color-scheme: dark" in page


def test_terminal_report_shows_every_row(demo, report):
    out = io.StringIO()
    demo.report.print_report(report, Console(file=out, width=120))
    for text in ("2.00 times", "2.00 to 2.00 times", "+0.2500", "host_bf16_gemm", "MiB"):
        assert text in out.getvalue()


def test_areas_are_stacked_and_share_a_scale(demo, report):
    step = report["step_memory"]["stock"]
    svg = demo.report.area_chart(step, label="x", top=8 << 20)
    root = ElementTree.fromstring(svg)
    polygons = [p.get("points") for p in root.iter() if p.tag.endswith("polygon")]
    corners = [[tuple(map(float, c.split(","))) for c in points.split()] for points in polygons]
    assert len(corners) == 3
    for lower, upper in itertools.pairwise(corners):
        assert lower[:3] == upper[:2:-1]  # the ceiling of one is the floor of the next
    ticks = [float(t.text) for t in root.iter() if t.get("class") == "tick"]
    assert ticks[-1] >= 8
    bottom, largest = corners[0][-1][1], corners[-1][1][1]
    assert bottom - largest == pytest.approx(4 / ticks[-1] * (220 - 26 - 12), abs=0.2)
    page = demo.report.to_html(report)
    assert page.count("<polygon") == 6


@pytest.mark.parametrize("values", [[0.0, 0.0], [1e-5, -3e-5], [8.31, 3.97], [4.0, 4.0]])
@pytest.mark.parametrize("zero_line", [False, True])
def test_chart_ticks_enclose_the_values(demo, values, zero_line):
    svg = demo.report.line_chart(
        [1, 2], {"accel": values}, label="x", height=100, zero_line=zero_line
    )
    root = ElementTree.fromstring(svg)
    ticks = [float(t.text) for t in root.iter() if t.get("class") == "tick"]
    assert 3 <= len(ticks) <= 7
    assert min(ticks) <= min(values) <= max(values) <= max(ticks)
    assert not zero_line or 0 in ticks


def test_both_sides_differ_in_accel_flags_only(demo, tmp_path):
    data = demo.corpus.Corpus(tmp_path, {})
    plan = demo.training.Plan()
    flags = plan.training_flags(data, tmp_path, tmp_path)
    assert not [f for f in flags if f.startswith("--accel")]
    for side in demo.training.SIDES.values():
        for flag in side.flags:
            # stock Megatron demands the others without Transformer Engine and Apex
            own = flag.startswith("--accel") or flag == "off"
            demanded = ("--no-gradient-accumulation-fusion", "--transformer-impl", "local")
            assert own or flag in demanded


def test_the_first_launch_that_fails_ends_the_other(demo, tmp_path):
    fails, waits = tmp_path / "fails.py", tmp_path / "waits.py"
    fails.write_text("raise SystemExit('the reason')\n")
    waits.write_text("import time\ntime.sleep(250)\n")

    def start(script: Path, on_start) -> None:
        log = tmp_path / f"{script.stem}.log"
        demo.training.launch(script, [], log, ranks=1, on_start=on_start)

    with pytest.raises(demo.training.LaunchError, match="the reason"):
        demo.training.launch_both([lambda p: start(waits, p), lambda p: start(fails, p)])


def test_a_failed_launch_says_why_and_where(demo, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('the reason')\n")
    lines: list[str] = []
    with pytest.raises(demo.training.LaunchError, match=r"(?s)the reason.*exit status 1") as error:
        demo.training.launch(script, [], tmp_path / "log", ranks=1, on_line=lines.append)
    assert str(tmp_path / "log") in str(error.value)
    assert any("the reason" in line for line in lines)


def test_clear_removes_only_what_the_demo_made(demo, tmp_path):
    folder = tmp_path / "new"
    demo.run.clear(folder)
    (folder / "accel").mkdir()
    (folder / "report.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    demo.run.clear(folder)
    assert {p.name for p in folder.iterdir()} == {"notes.txt", demo.run.MARKER}


def test_clear_refuses_a_folder_of_somebody_else(demo, tmp_path):
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel" / "source.py").write_text("mine")
    with pytest.raises(ValueError, match="is not the demo's and has accel, which"):
        demo.run.clear(tmp_path)
    assert [p.name for p in tmp_path.rglob("*")] == ["accel", "source.py"]
