"""Megatron on what torch-npu's redirect of ``torch.cuda`` leaves, as far as a host can show it.

``stand_in`` answers as torch-npu does on a card; what a card computes is not tried here.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel.device import npu
from accel.parallel.schedule.pipeline_link import one_queue_for_all
from accel.testing.distributed import under_torchrun
from tests.distributed.training import MLA, SCRIPT, losses, model
from tests.npu.schemas import WHEEL
from tests.versions import ROOT, installed

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own processes")

LAUNCH = f"""
import runpy, sys
sys.argv = [{str(SCRIPT)!r}, *sys.argv[1:]]
from accel.device import npu
table = npu.patches()
npu.patches = lambda: tuple(p for p in table if p.target.rpartition(":")[2] not in {{left_out}})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(
    device: str, folder: Path, *flags: str, ranks: int = 1, left_out: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    program = folder / f"{device}.py"
    program.write_text(LAUNCH.format(left_out=left_out))
    path = [str(ROOT / "tests" / "npu" / "stand_in"), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "ACCEL_DEVICE": device}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-W", "ignore", *launch, str(program), *model(flags), *flags]
    return subprocess.run(
        command,
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_what_torch_npu_knows_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.device.audience.AUDIENCE", {"tests"})
    assert npu.capability(lambda device: None)() == (8, 0)
    assert npu.capability(lambda device: (9, 0))() == (9, 0)
    found = SimpleNamespace(major=None, total_memory=64)
    assert vars(npu.properties(lambda device: found)()) == {
        "major": 8,
        "minor": 0,
        "total_memory": 64,
    }
    found.major = 9
    assert npu.properties(lambda device: found)() is found
    assert npu.get_backend(lambda group: "hccl")() == "nccl"
    assert npu.get_backend(lambda group: "gloo")() == "gloo"
    compiled = npu.compile_(lambda model, **kwargs: "compiled")
    assert compiled(print) is print
    assert compiled(dynamic=True)(print) is print
    monkeypatch.setattr("accel.device.audience.AUDIENCE", {"megatron"})
    assert npu.capability(lambda device: None)() is None
    assert npu.get_backend(lambda group: "hccl")() == "hccl"
    assert compiled(print) == "compiled"


def test_a_time_out_is_set_on_what_serves_the_group() -> None:
    found: list[timedelta] = []

    def set_by_torch(timeout: timedelta, group: object) -> None:
        assert group is on_gpus

    class Backend:
        _set_default_timeout = staticmethod(found.append)

    def group(device: str) -> Any:
        types = [SimpleNamespace(type=device)]
        return SimpleNamespace(_device_types=types, _get_backend=lambda device: Backend)

    on_gpus, minute = group("cuda"), timedelta(minutes=1)
    npu.set_pg_timeout(set_by_torch)(minute, on_gpus)
    assert found == []
    npu.set_pg_timeout(set_by_torch)(minute, group("npu"))
    assert found == [minute]


def test_one_queue_for_all_neighbours_is_told_by_what_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(device: str, bound: object) -> str | None:
        group: Any = SimpleNamespace(bound_device_id=bound)
        place: Any = SimpleNamespace(type=device)
        return one_queue_for_all(group, place)

    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "20")
    assert told("npu", "npu:0") is None
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "0")
    assert told("npu", None) == "P2P_HCCL_BUFFSIZE=0 is set: then HCCL"
    assert told("cuda", None) is None
    assert told("cuda", "cuda:0") == "init_process_group was given a device_id: then NCCL"


@pytest.mark.parametrize(
    ("op", "value"), [("SUM", 6.0), ("AVG", 3.0), ("PRODUCT", 8.0), ("MIN", 2.0), ("MAX", 4.0)]
)
def test_fp64_is_gathered_and_reduced(op: str, value: float) -> None:
    parts = torch.tensor([[2.0], [4.0]], dtype=torch.float64)
    assert npu._reduced(parts, getattr(dist.ReduceOp, op)).item() == value


def test_another_reduction_of_fp64_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"all_reduce of torch.float64 on Ascend: .*BXOR"):
        npu._reduced(torch.ones(2, 1, dtype=torch.float64), dist.ReduceOp.BXOR)


BF16 = ("--bf16", "--train-iters", "3")
PROFILED = (
    *("--profile", "--profile-ranks", "0", "--profile-step-start", "1", "--profile-step-end", "2"),
    *("--log-straggler", "--log-device-memory-used", "--exit-signal-handler"),
)
EXPERTS = (
    *("--num-experts", "4", "--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall"),
    *("--expert-model-parallel-size", "2", "--use-distributed-optimizer"),
)


FSDP2 = (
    *("--use-torch-fsdp2", "--ckpt-format", "torch_dist", "--no-gradient-accumulation-fusion"),
    "--untie-embeddings-and-output-weights",
)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(1, ("--accel-preset", "off", *BF16, *PROFILED), id="off"),
        pytest.param(1, ("--fp16", "--initial-loss-scale", "64", "--train-iters", "3"), id="fp16"),
        pytest.param(2, ("--tensor-model-parallel-size", "2", *BF16), id="tp2"),
        pytest.param(2, (*EXPERTS, *BF16), id="experts"),
        pytest.param(1, (*MLA, *BF16), id="mla"),
        pytest.param(2, (*FSDP2, *BF16), id="fsdp2"),
    ],
)
def test_megatron_trains_as_on_the_host(ranks: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    found = {}
    for device in ("npu", "cpu"):
        done = train(device, tmp_path, *flags, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        found[device] = losses(done.stdout)
    assert len(found["cpu"]) == 3
    # the host's own features, of matrix products and collectives, are off on the stand-in
    assert found["npu"] == pytest.approx(found["cpu"], rel=2e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("left_out", "flags", "error"),
    [
        ("compile", BF16, "Unsupported device type: npu"),
        ("all_reduce", BF16, "Unsupported data type torch.float64"),
        ("Tensor.type", (*BF16, "--accel-preset", "off"), "Wrapped parameters must be one of"),
        ("get_backend", (*BF16, "--exit-signal-handler"), "RuntimeError"),
        ("emit_nvtx.__enter__", (*BF16, *PROFILED), "__enter__: are you sure"),
        ("get_device_capability", (*BF16, *EXPERTS[:3]), "'NoneType' object is not subscriptable"),
        (
            "get_device_properties",
            (*BF16, "--tensor-model-parallel-size", "2"),
            "'NoneType' and 'int'",
        ),
    ],
)
def test_without_one_of_the_patches_it_does_not(
    left_out: str, flags: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    ranks = 2 if "--tensor-model-parallel-size" in flags else 1
    done = train("npu", tmp_path, *flags, ranks=ranks, left_out=(left_out,))
    assert done.returncode != 0
    assert error in done.stderr


def _megatrons() -> dict[str, Path]:
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    beside = (Path(sys.prefix) / "megatron").iterdir()
    return {installed(): Path(spec.origin).parents[1], **{p.name: p / "megatron" for p in beside}}


def _names_of_cuda(tree: ast.AST) -> Iterator[str]:
    """``a`` and ``a.b`` of each ``torch.cuda.a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            inner = node.module.split(".")[2:]
            yield from (".".join([*inner, alias.name]) for alias in node.names)
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.fullmatch(r"torch\.cuda(\.\w+)+", dotted):
                yield dotted.removeprefix("torch.cuda.")


SERVED_BY_TORCH = {
    "amp.custom_fwd": "the same functions on every device",
    "amp.custom_bwd": "the same functions on every device",
    "OutOfMemoryError": "torch.OutOfMemoryError, which torch-npu raises",
    "random": "the module itself",
    "_lazy_call": "at once where is_initialized, which is the redirect's, says so",
    "_lazy_init": "nothing where is_initialized says so",
    "random.get_rng_state": "the redirect's, of the module",
}
NOT_ON_ASCEND = {
    "Stream.priority_range": "--high-priority-a2a-comm-stream: torch-npu's own error says so",
    "_sleep": "in the capture of a CUDA graph",
    "memory.CUDAPluggableAllocator": "--nccl-ub: memory that NCCL registers",
    "memory.MemPool": "--nccl-ub: memory that NCCL registers",
}


@pytest.mark.filterwarnings("ignore:invalid escape sequence:SyntaxWarning")  # Megatron's
@pytest.mark.parametrize("version", sorted(_megatrons()))
def test_each_name_of_torch_cuda_is_served_by_somebody(version: str) -> None:
    listed = ast.parse((WHEEL / "torch_npu" / "npu" / "__init__.py").read_text())
    served = {  # copied one by one; a module's names replace the module's
        constant.value
        for node in ast.walk(listed)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for constant in ast.walk(node.value)
        if isinstance(constant, ast.Constant)
    }
    redirect = (WHEEL / "torch_npu" / "contrib" / "transfer_to_npu.py").read_text()
    served |= set(re.findall(r"torch\.cuda\.([\w.]+) =", redirect))
    ours = {
        f"{patch.target.partition(':')[0]}.{patch.target.partition(':')[2]}"
        for patch in npu.patches()
    }
    served |= {name.removeprefix("torch.cuda.") for name in ours if name.startswith("torch.cuda.")}
    asked: set[str] = set()
    root = _megatrons()[version]
    for path in [*root.glob("core/**/*.py"), *root.glob("training/**/*.py")]:
        asked |= set(_names_of_cuda(ast.parse(path.read_text())))
    assert "current_device" in asked
    unserved = {
        name
        for name in asked
        if name not in served
        and name.partition(".")[0] not in served
        and not any(other.startswith(f"{name}.") for other in served)
        and name not in SERVED_BY_TORCH
        and name not in NOT_ON_ASCEND
    }
    assert not unserved
