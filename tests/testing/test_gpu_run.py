"""`make gpu` as far as it goes without one: parts that fail, hang or are done, and what a case reports."""

import json
import multiprocessing
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accel.parallel import overlapped_linear
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import build, compiled_ops, memory, overlap, pack_peers, report
from benchmarks.gpu.ops import (
    LIGER,
    attentions,
    experts,
    losses,
    norms,
    optimizers,
    small,
    without_late,
    works,
)
from benchmarks.gpu.report import (
    OURS_IN_TRITON,
    memory_table,
    ops_table,
    overlap_table,
    target_of,
    training_table,
    verdict,
    with_side,
    work_of,
)
from benchmarks.gpu.setting import PEAKS, Setting, short_name
from benchmarks.gpu.sides import ScriptError, run_script
from benchmarks.gpu.tests import OUTCOMES
from benchmarks.gpu.timing import Times, measure
from benchmarks.gpu.training import LLAMA, fitting, long_step
from benchmarks.gpu.triton_ops import has_both
from benchmarks.gpu.work import COMPILED, EAGER, LATE, OURS, Work, as_row, can_compile, check, run

MEASURED = [
    file.parent for file in (gpu.CHECKOUT / "benchmarks" / "results").glob("*/results.json")
]
LIMITS = {"copy_bytes_per_s": 1e12, "gemm_flops_per_s": 1e12}


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Three parts in place of the real ones: one that works, one that fails, one that hangs."""
    package = tmp_path / "scratch_parts"
    package.mkdir()
    (package / "__init__.py").touch()
    bodies = {
        "works": "print('fine')",
        "fails": "print('no such kernel'); raise SystemExit(3)",
        "hangs": "import time; print('waiting', flush=True); time.sleep(600)",
        "report": "print('reported')",
    }
    for name, body in bodies.items():
        (package / f"{name}.py").write_text(body)
    monkeypatch.setattr(gpu, "PACKAGE", "scratch_parts")
    monkeypatch.setattr(
        gpu,
        "PARTS",
        (gpu.Part("hangs", 5), gpu.Part("fails", 60), gpu.Part("works", 60, ("left.json",))),
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "out"


def state(folder: Path) -> dict:
    return json.loads((folder / "state.json").read_text())["parts"]


def test_a_failing_part_hides_no_other_and_only_it_is_done_again(parts, capsys):
    assert gpu.main(["--folder", str(parts)]) == 1
    first = state(parts)
    assert first["works"]["status"] == "done"
    assert first["fails"]["why"] == "exit code 3: no such kernel"
    assert first["hangs"]["why"] == "not done after 5 s: waiting"
    assert "reported" in capsys.readouterr().out
    gpu.main(["--folder", str(parts)])
    assert "works      done before" in capsys.readouterr().out
    assert state(parts)["works"] == first["works"]


def test_other_sources_begin_anew(parts, monkeypatch):
    gpu.main(["--folder", str(parts), "--only", "works"])
    (parts / "left.json").write_text("measured with other sources")
    monkeypatch.setattr(gpu, "fingerprint", lambda: "another")
    gpu.main(["--folder", str(parts), "--only", "fails"])
    assert list(state(parts)) == ["fails"]
    assert not (parts / "left.json").exists()


def test_again_goes_on_from_nothing(parts, capsys):
    gpu.main(["--folder", str(parts), "--only", "works"])
    (parts / "left.json").touch()
    gpu.main(["--folder", str(parts), "--only", "works"])
    assert (parts / "left.json").exists()
    gpu.main(["--folder", str(parts), "--only", "works", "--again"])
    assert not (parts / "left.json").exists()


def test_sources_tell_a_change(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "CHECKOUT", tmp_path)
    kernel = tmp_path / "csrc" / "cuda" / "rms_norm.cu"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("one")
    before = gpu.fingerprint()
    assert gpu.fingerprint() == before
    kernel.write_text("two")
    assert gpu.fingerprint() != before


def test_no_part_begins_without_time(parts, capsys):
    assert gpu.main(["--folder", str(parts), "--minutes", "0.1"]) == 1
    assert "works      no time left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_short_names(device, short):
    assert short_name(device) == short


def test_llama_has_the_weights_of_llama_3_8b():
    multiplied, table = LLAMA.parameters
    assert multiplied + table == pytest.approx(8.03e9, rel=1e-3)
    # 6 P S and the causal half of the attention, by hand for 32 layers of 4096
    by_hand = 4 * 4096 * (6 * multiplied + 6 * 32 * 4096 * 4096)
    assert LLAMA.flops_per_step == pytest.approx(by_hand)


def test_as_many_layers_as_fit():
    assert fitting(80 << 30).num_layers < fitting(140 << 30).num_layers
    with pytest.raises(ValueError, match="not one layer"):
        fitting(8 << 30)
    assert set(PEAKS) >= {"h100", "h200"}


def test_micro_batches_as_large_as_fit_and_steps_of_as_many_sequences():
    sizes = []
    for gib in (80, 140):
        shape = memory.fitting_micro_batch(gib << 30)
        shape = replace(shape, micro_batches=memory.SEQUENCES // shape.micro_batch_size)
        flags = shape.megatron_flags()
        assert flags[flags.index("--global-batch-size") + 1] == str(memory.SEQUENCES)
        sizes.append(int(flags[flags.index("--micro-batch-size") + 1]))
        once = replace(shape, micro_batch_size=1, micro_batches=memory.SEQUENCES)
        assert shape.flops_per_step == once.flops_per_step
    assert sizes == [2, 4]


def test_a_long_step_has_micro_batches_as_large_as_fit():
    sizes = []
    for gib in (16, 80, 140):
        shape = long_step(
            replace(LLAMA, num_layers=1) if gib == 16 else fitting(gib << 30), gib << 30
        )
        assert shape.sequences * shape.seq_length == 65536
        sizes.append(shape.micro_batch_size)
    assert sizes == [1, 2, 4]


def test_a_budget_of_half_of_stocks_activations():
    shape = fitting(80 << 30)
    kept = 18 * sum(shape.parameters)
    assert memory.budget_of(shape, kept + (20 << 30)) == pytest.approx(kept / 2**30 + 10)
    sides = {memory.STOCK: {"peak_bytes": kept + (20 << 30)}}
    flags = memory.flags_of(memory.BUDGET, shape, sides)
    assert flags[flags.index("--accel-memory-budget") + 1] == f"{kept / 2**30 + 10:.3f}"
    assert flags[-2:] == ("--log-memory-interval", "1")


def test_what_memory_costs_is_judged_by_time_losses_and_peak():
    def side(ms, peak=10, losses=(1.0, 2.0)):
        return {"ms": ms, "peak_bytes": peak << 30, "losses": list(losses)}

    sides = {
        "stock": side(200, 20),
        "accel fast": side(100),
        "recompute": side(103.9 * 2) | {"base_ms": 200},
        "swap": side(102),
        "budget": side(105, losses=(1.0, 2.1)),
        "host optimizer": {"failed": "no room\nfor it"},
        "least": side(130, 9),
    }
    table = memory_table({"sides": sides}, rehearsal=False)
    verdicts = {line.split(" | ")[0].strip("| "): line.rstrip("| ") for line in table[2:]}
    assert verdicts["recompute"].endswith("the same | 1.04 |  | met")
    assert verdicts["swap"].endswith("the same | 1.01 |  | missed")
    assert verdicts["budget"].endswith("**others** | 1.1 |  | missed")
    assert "failed: for it" in verdicts["host optimizer"]
    assert verdicts["least"].endswith("| 0.5 |  | met")
    assert not [line for line in memory_table({"sides": sides}, True) if "met" in line]


def test_what_no_side_can_reach_is_beyond_the_limit():
    parameters = 1 << 30
    sides = {
        "stock": {"ms": 300, "peak_bytes": 20 << 30, "losses": [1.0]},
        "accel fast": {"ms": 200, "peak_bytes": 18 << 30, "losses": [1.0]},
        "host optimizer": {"ms": 500, "peak_bytes": 9 << 30, "losses": [1.0]},
        "least": {"ms": 210, "peak_bytes": 17 << 30, "losses": [1.0]},
    }
    limits = memory.limits(sides, parameters, link=12.0 * parameters / 0.2)
    assert limits == {"host optimizer": pytest.approx(2.0), "least": pytest.approx(0.8)}
    rows = {"sides": sides, "limits": limits}
    *_, on_host, least = memory_table(rows, rehearsal=False)
    assert on_host.endswith("| the same | 1.01 | 2.00 | missed (beyond the limit) |")
    assert least.endswith("| 85% |  | 0.5 | 0.80 | missed (beyond the limit) |")
    sides["host optimizer"]["ms"] = 390  # no limit, if it can be passed
    assert memory_table(rows, rehearsal=False)[-2].endswith("| 2.00 | missed |")
    assert memory.limits({}, parameters, link=1.0) == {}


def test_a_script_is_the_only_rank_of_a_process_with_its_own_log(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, sys\n"
        "print(sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'], __name__)\n"
        "print(multiprocessing.get_start_method(), 'megatron' in sys.modules)\n"
        "sys.argv[1:] == ['fails'] and sys.exit('no such flag')\n"
    )
    log = tmp_path / "logs" / "script.log"
    run_script(script, ["--a", "1"], log, threads=1)
    printed = log.read_text().splitlines()
    assert printed[0] == "['--a', '1'] 0 1 __main__"
    assert printed[1] == f"{multiprocessing.get_context().get_start_method()} False"
    with pytest.raises(
        ScriptError, match=r"script.py ended with exit code 1:\n(.*\n)*no such flag"
    ):
        run_script(script, ["fails"], log, threads=1)


@pytest.mark.parametrize("case", overlap.TOYS, ids=lambda case: case.name)
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_the_host_is_the_other_rank(case, chunks, monkeypatch):
    monkeypatch.setattr(overlapped_linear, "Transfer", overlap.Copies)
    wire = overlap.Wire(case.sent, "cpu")
    for _ in range(2):  # the second call begins with the first part again
        assert overlap.check(case, wire, "cpu", chunks) is None
    wire.coming = wire.coming.flip(0)
    x, w = case.make("cpu")
    y = case.ours(wire, chunks)(x, w)
    wire.coming = wire.coming.flip(0)
    assert not torch.allclose(y.float(), case.reference(x, w, wire), rtol=0.1, atol=0.1)


def test_what_is_hidden():
    assert overlap.hidden_share(ours=100, gemm=100, comm=50) == 1
    assert overlap.hidden_share(ours=150, gemm=100, comm=50) == 0
    us = {"gemm": 100.0, "comm": 100.0, "1 chunks": 200.0, "4 chunks": 110.0}
    row = {"us": us, "best": "4 chunks", "bytes_per_s": 5e10, "hidden": 0.9}
    long = {**row, "us": {**us, "comm": 125.0}, "hidden": 0.7}
    rows = {"good": row, "bad": {**row, "hidden": 0.8}, "long": long, "none": {"failed": "no room"}}
    good, bad, long, none = overlap_table(rows, rehearsal=False)[2:]
    assert good.endswith("| 90% | 100% | 90% | met |")
    assert bad.endswith("| 80% | 100% | 90% | missed |")
    assert long.endswith("| 70% | 80% | 90% |  |")  # so much cannot hide
    assert "failed: no room" in none


def test_what_training_reaches():
    made = {"ms": 130.0, "tokens_per_s": 1.0, "mfu": 0.5, "peak_bytes": 0, "losses": [2.0, 1.0]}
    sides = {
        "stock": made,
        "accel fast": {**made, "ms": 100.0, "mfu": 0.65, "losses": [2.0, 1.25]},
        "accel max": {**made, "ms": 120.0, "mfu": 0.55},
        "long step": {**made, "ms": 400.0, "mfu": 0.61, "sequences": 16},
        "late": {"failed": "no time left"},
    }
    stock, fast, most, long, late = training_table({"sides": sides}, rehearsal=False)[2:]
    assert stock.endswith("| 1.00x | 0.00e+00 |  |")
    assert fast.endswith("| 1.30x | 2.50e-01 | 1.3x met, 60% met |")
    assert most.endswith("| 1.08x | 0.00e+00 | 1.3x missed, 60% missed |")
    assert long.endswith("|  |  | 60% met |")  # stock takes no such step
    assert "failed: no time left" in late


def doubled(**sides) -> Work:
    return Work(
        op="double",
        shape="64",
        mode="forward",
        make=lambda device: (torch.randn(64, device=device).bfloat16(),),
        sides=sides,
        num_bytes=4 * 64,
        target_over_best=1.0,
    )


def test_a_wrong_or_absent_side_is_told_and_hides_no_other():
    work = doubled(
        accel=lambda x: x * 2.1,
        eager=lambda x: x * 2,
        liger="ImportError: none",
        late=lambda x: 1 / 0,
    )
    assert set(check(work, "cpu", {k: f for k, f in work.sides.items() if callable(f)})) == {
        "accel",
        "late",
    }
    results = run(work, "cpu", None)
    assert isinstance(results[EAGER], Times)
    assert "wrong: relative errors" in results[OURS]
    assert results["liger"] == "ImportError: none"
    assert "ZeroDivisionError" in results["late"]
    row = as_row(work, results, LIMITS, "h200")
    assert "absent" in row["sides"]["accel"]
    assert row["limit_us"] == pytest.approx(1e6 * 256 / 1e12)
    assert row["target_us"] is None
    assert target_of(row) == results[EAGER].best


def test_the_target_is_the_fastest_peers_whichever_part_has_timed_it():
    sides = {"accel": {"us": 90.0, "host_us": 1.0, "note": ""}, "cudnn": {"us": 100.0, "note": ""}}
    row = {"op": "attention", "mode": "forward", "shape": "S", "limit_us": 50.0, "sides": sides}
    row |= {"target_us": None, "target_over_best": 0.8}
    assert target_of(row) == 125.0
    assert verdict(row, rehearsal=False) == "met"
    late = [{**row, "sides": {"flash-attn 4": {"us": 64.0, "note": ""}}}]
    (row,) = with_side([row], late, "flash-attn 4", "flash-attn 4")
    assert ops_table([row], rehearsal=False)[-1].endswith("flash-attn 4 64.0 | 80.0 | missed |")
    row["sides"] |= {"flash-attn 3": {"absent": "not here"}, OURS_IN_TRITON: {"us": 10.0}}
    assert target_of(row) == 80.0
    assert target_of({**row, "target_us": 70.0}) == 70.0
    assert target_of({**row, "target_over_best": None}) is None
    (attention, *_), (product, *_) = attentions(toy=True), experts(toy=True)
    assert (attention.target_over_best, product.target_over_best) == (0.98, 1.0)


@pytest.mark.parametrize("folder", MEASURED, ids=lambda folder: folder.name)
def test_results_md_is_the_page_of_results_json(folder, tmp_path, capsys):
    (tmp_path / "results.json").write_text((folder / "results.json").read_text())
    assert report.main(["--rewrite", str(tmp_path)]) == 0
    page = (folder / "results.md").read_text()
    assert (tmp_path / "results.md").read_text() == capsys.readouterr().out == page


def test_a_training_table_names_the_peak_of_its_mfu():
    title = report.training_title({"shape": "Llama", "peak_flops": 989.4e12})
    assert title == "Training, Llama; MFU of 989.4 TFLOP/s, the datasheet's dense bf16 peak:"
    assert report.training_title({"shape": "Llama", "peak_flops": None}) == "Training, Llama:"


ROWS = {work.name: work for work in works(toy=True) if work.op != "attention by Triton"}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_right_and_runs_on_a_cpu(name):
    work = ROWS[name]
    peers = {side: f for side, f in work.sides.items() if callable(f)}
    sides = {side: f for side, f in peers.items() if side != "liger"}  # its kernels are for GPUs
    assert {OURS} < set(sides)
    assert check(work, "cpu", sides) == {}
    results = run(work, "cpu", None)
    assert all(isinstance(results[side], Times) for side in sides)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_tells_another_result(name):
    """Of each result and gradient that the row compares, half as much again is wrong."""
    work = ROWS[name]

    def wrong(*arguments):
        found = work.sides[OURS](*arguments)
        several = isinstance(found, list | tuple)
        results = list(found[: work.outputs]) if several else [found]
        results[-1] = results[-1] * 1.5
        return results if several else results[0]

    assert check(
        work, "cpu", {**{EAGER: work.sides.get(EAGER, work.reference)}, OURS: wrong}
    ).keys() == {OURS}


def test_ops_that_have_a_kernel_have_a_row():
    names = {(work.op, work.mode) for work in works(toy=True)}
    both = {
        (op, m)
        for op in (
            "bias_gelu",
            "squared_relu",
            "masked_softmax",
            "rope",
            "qkv_rope",
            "moe_permute",
            "moe_unpermute",
            "topk_router",
            "moe_aux_scores",
        )
        for m in ("forward", "backward")
    }
    assert names >= both | {("gemm_accumulate", "forward"), ("grouped_gemm_wgrad", "forward")}


def test_a_run_that_is_cut_off_leaves_out_the_newest_rows():
    last = [work.last for work in works(toy=True)]
    assert last == sorted(last)
    assert 0 < sum(last) < len(last)
    assert {name for name, work in ROWS.items() if work.last and work.compiled} == {
        f"{op} {mode} 8 x 32"
        for op in ("bias_gelu", "squared_relu")
        for mode in ("forward", "backward")
    }


def test_ligers_loss_of_whole_logits_is_asked_for_the_mean(monkeypatch):
    def row() -> Work:
        return next(work for work in losses(toy=True) if work.shape.endswith("mean"))

    monkeypatch.setitem(sys.modules, LIGER, None)
    assert row().sides["liger"].startswith("ModuleNotFoundError: import of liger_kernel")

    def fused(input, weight, target, bias=None, reduction="mean"):
        return torch.nn.functional.cross_entropy(input @ weight.t(), target, reduction=reduction)

    liger = SimpleNamespace(liger_fused_linear_cross_entropy=fused)
    monkeypatch.setitem(sys.modules, LIGER, liger)
    work = row()
    results = run(work, "cpu", None)
    assert all(isinstance(results[side], Times) for side in (OURS, EAGER, "liger"))


def test_a_peer_that_is_less_exact_is_timed_and_told():
    sides = {
        OURS: lambda x: 2.04 * x,
        EAGER: lambda x: 2 * x,
        "near": lambda x: 2.04 * x,
        "far": lambda x: 2.2 * x,
    }
    results = run(doubled(**sides), "cpu", None)
    assert isinstance(results["near"], Times)
    assert "less exact" in results["near"].note
    assert results["far"].startswith("wrong")
    assert results[OURS].startswith("wrong")


def test_one_side_alone_is_timed_and_eager_says_whether_it_is_right():
    sides = {"accel": lambda x: x * 2, "eager": lambda x: x * 2, "liger": lambda x: 1 / 0}
    assert set(run(doubled(**sides), "cpu", None, timed=[OURS])) == {OURS}
    wrong = run(doubled(**{**sides, "accel": lambda x: x * 2.1}), "cpu", None, timed=[OURS])
    assert "wrong: relative errors" in wrong[OURS]


def test_tritons_kernels_are_a_peer_where_there_are_others():
    assert has_both("rms_norm")
    assert has_both("swiglu")
    assert has_both("bias_gelu")
    assert has_both("scale")
    assert not has_both("attention")
    assert not has_both("qkv_rope")
    ours, other = {"us": 1.0}, {"us": 2.0}
    row = {"op": "rope", "mode": "forward", "shape": "2 x 8", "sides": {"accel": ours}}
    by_triton = [{**row, "sides": {"accel": other}}, {**row, "mode": "backward"}]
    (merged,) = with_side([row], by_triton, OURS, "accel in Triton")
    assert merged == {**row, "sides": {"accel": ours, "accel in Triton": other}}
    assert with_side([row], [], OURS, "accel in Triton") == [row]


def test_a_side_of_another_work_is_no_peer():
    """As of a backward that has a gradient more since."""
    row = {"op": "add_rms_norm", "mode": "backward", "shape": "2 x 8"}
    ours = {"us": 4.0, "rate": 2e6}
    theirs = [{**row, "sides": {OURS: {"us": 3.0, "rate": 2e6}}}]
    (merged,) = with_side([{**row, "sides": {OURS: ours}}], theirs, OURS, OURS_IN_TRITON)
    told = "timed for {6} bytes or operations, the row for {8}"
    assert merged["sides"] == {OURS: ours, OURS_IN_TRITON: {"absent": told}}
    theirs[0]["sides"][OURS] = {"us": 5.0, "rate": 1.6e6}
    (merged,) = with_side([{**row, "sides": {OURS: ours}}], theirs, OURS, OURS_IN_TRITON)
    assert merged["sides"][OURS_IN_TRITON]["us"] == 5.0


@pytest.mark.parametrize("folder", MEASURED, ids=lambda folder: folder.name)
def test_sides_of_a_row_are_of_one_work_and_none_is_far_beyond_the_ceiling(folder):
    """By a tenth at most: what is only read goes faster than a copy."""
    for row in json.loads((folder / "results.json").read_text())["ops"]:
        assert len(work_of(row["sides"])) <= 1
        for side in row["sides"].values():
            if row["bound"] == "bytes" and "us" in side and not side["note"]:
                assert side["us"] >= 0.9 * row["limit_us"]


def test_what_torch_compile_makes_of_eager_is_timed_where_it_is_asked_for(monkeypatch):
    sides = {"accel": lambda x: x * 2, "eager": lambda x: x * 2}
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: f)
    assert not can_compile(doubled(**sides), "cpu")
    assert can_compile(doubled(**sides), "cuda")
    assert not can_compile(doubled(accel=sides["accel"], eager="not here"), "cuda")
    monkeypatch.setattr("benchmarks.gpu.work.can_compile", lambda *_: True)
    assert set(run(doubled(**sides), "cpu", None)) == {OURS, EAGER}
    assert set(run(doubled(**sides), "cpu", None, timed=[COMPILED])) == {COMPILED}


def test_peers_that_compile_at_their_first_call_are_timed_apart():
    sides = {"accel": lambda x: x * 2, "eager": lambda x: x * 2, "quack": lambda x: x * 2}
    work = replace(doubled(**sides), compiled=False)
    assert compiled_ops.compiles(work, "cuda")
    assert not compiled_ops.compiles(replace(work, sides={**sides, "quack": "not here"}), "cuda")
    (early,) = without_late(iter([work]))
    assert set(run(early, "cpu", None)) == {OURS, EAGER}
    assert set(run(work, "cpu", None, timed=[COMPILED, *LATE])) == {"quack"}


def test_peers_are_packed_and_unpacked(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("first", "second"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", f"NAME = {name!r}")
            wheel.writestr("shared/" + name, name)
    pack_peers.pack(tmp_path.glob("*.whl"), wheels / "peers.tar.xz")
    assert [file.name for file in wheels.iterdir()] == ["peers.tar.xz"]
    monkeypatch.setattr(build, "WHEELS", wheels)
    monkeypatch.setattr(build, "SITE", tmp_path / "site")
    build.unpack_wheels()
    assert (tmp_path / "site" / "first" / "__init__.py").read_text() == "NAME = 'first'"
    assert sorted(os.listdir(tmp_path / "site" / "shared")) == ["first", "second"]


def test_kernels_are_built_for_the_gpu_that_is_there():
    assert build.architectures((9, 0)) == {"ACCEL_CUDA_ARCHS": "90"}
    assert build.architectures((10, 0)) == {"ACCEL_CUDA_ARCHS": "100"}
    assert build.architectures((8, 9)) == {}  # runs what is built for 80


def test_the_hosts_time_has_a_target_of_its_own():
    (work,) = small(toy=True)
    times = Times(graph=1.0, eager=1.0, host=81.0, spread=(1.0, 1.0))
    row = as_row(work, {OURS: times}, LIMITS, "h200")
    assert verdict(row, rehearsal=False) == "missed"
    assert ops_table([row], rehearsal=False)[-1].endswith("| host 80.0 | missed |")
    row["sides"][OURS]["host_us"] = 79.0
    assert verdict(row, rehearsal=False) == "met"
    assert verdict(row, rehearsal=True) == ""
    assert verdict({**row, "target_us": 0.5}, rehearsal=False) == "missed"
    del row["host_target_us"]  # as in results from before
    assert verdict(row, rehearsal=False) == ""


def test_a_sum_with_a_residual_has_a_gradient_of_its_own():
    (work,) = (w for w in norms(toy=True) if (w.op, w.mode) == ("add_rms_norm", "backward"))
    eager = work.sides[EAGER]

    def forgets(*arguments):
        y, total = eager(*arguments)
        return y, total.detach() + 0 * y

    assert check(
        work, "cpu", {OURS: work.sides[OURS], EAGER: eager, "forgets": forgets}
    ).keys() == {"forgets"}


def test_nan_is_wrong():
    work = doubled(accel=lambda x: x * torch.nan, eager=lambda x: x * 2)
    assert set(check(work, "cpu", work.sides)) == {"accel"}


def test_a_side_that_overwrites_its_input_spoils_no_other():
    work = doubled(accel=lambda x: x.mul_(2), eager=lambda x: x * 2)
    assert check(work, "cpu", work.sides) == {}


def test_times_of_a_side_that_raises():
    result = measure({"a": lambda: 1 / 0, "b": lambda: None}, {"a": [()], "b": [()]}, None)
    assert "ZeroDivisionError" in result["a"]
    assert result["b"].best >= 0


def test_setting_knows_its_time(tmp_path):
    setting = Setting.from_argv(["--folder", str(tmp_path), "--seconds", "100", "--rehearse"])
    assert (setting.device, setting.machine) == ("cpu", "rehearsal")
    assert 0 < setting.seconds_left <= 100
    assert sys.modules["benchmarks.gpu.setting"].CHECKOUT.joinpath("Makefile").exists()


def test_an_optimizer_step_left_out_is_wrong():
    """A step that changes little would hide in the rounding of bf16 weights."""
    (work,) = optimizers(toy=True)
    sides = {**work.sides, "accel": lambda params, *state: params[0]}
    assert set(check(work, "cpu", sides)) == {"accel"}
    assert check(work, "cpu", work.sides) == {}


def test_tests_that_have_passed_are_not_run_again(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # those below are no workers
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "test_two.py").write_text(
        "import os\ndef test_good(): pass\ndef test_bad(): assert 'MENDED' in os.environ\n"
    )
    file = tmp_path / "tests.jsonl"

    def outcome(**environment: str) -> str:
        path = os.pathsep.join([str(gpu.CHECKOUT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
        return subprocess.run(
            [*command, "-p", "benchmarks.gpu.tests", "-c", os.devnull, "--rootdir", str(folder)],
            env={**os.environ, "PYTHONPATH": path, OUTCOMES: str(file), **environment},
            capture_output=True,
            text=True,
            check=False,
        ).stdout

    assert "1 failed, 1 passed" in outcome()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["test"], row["outcome"]) for row in rows] == [
        ("test_two.py::test_good", "passed"),
        ("test_two.py::test_bad", "failed"),
    ]
    assert rows[1]["why"].startswith("AssertionError")
    assert "1 passed, 1 deselected" in outcome(MENDED="1")
    assert "2 deselected" in outcome()
