"""The doctor: each rule on made-up facts, and the whole of it where pieces are missing or broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from accel.cli import doctor, facts, findings, main, probe
from accel.cli.facts import Compiler, Cpu, Facts, Found
from accel.cli.versions import at_least
from accel.ops import _native
from accel.upstream import SUPPORTED_MEGATRON
from tests.cli.test_cli_commands import bare_python

HEALTHY = Facts(
    python=Found("3.12.1"),
    accel=Found("0.1.0"),
    torch=Found("2.13.0+cu130", "CUDA 13.0 build, no GPU visible"),
    megatron=Found(SUPPORTED_MEGATRON[-1], "megatron/core"),
    has_training=True,
    packages={"triton": None, "transformer_engine": None, "apex": None, "torch_npu": None},
    native=Found("avx2"),
    gpu=Found("Triton"),
    device=Found("cpu"),
    cpu=Cpu("a CPU", 2, 2, 8.0, {"avx2": True}),
    compiler=Compiler("g++", "g++ (Debian 12.2.0-14) 12.2.0"),
    nvidia_driver=False,
    checkout=True,
)


def examined(**changes: Any) -> list[tuple[str, str, str]]:
    found = findings.examine(replace(HEALTHY, **changes))
    return [(finding.level, finding.what, finding.fix) for finding in found]


def test_nothing_is_wrong_with_a_healthy_machine() -> None:
    assert examined() == []
    assert examined(compiler=Compiler("g++", None)) == [], "a compiler is not needed once built"


BAD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"python": Found("3.11.7")}, "error", "runs on 3.12 and 3.13", "make PYTHON=python3.12 setup"),
    ({"python": Found("3.14.0")}, "error", "runs on 3.12 and 3.13", "make PYTHON=python3.12 setup"),
    ({"missing": {"accel": ["wrapt>=2"]}}, "error", "wrapt>=2", 'pip install "wrapt>=2"'),
    ({"missing": {"megatron": ["einops"]}}, "warning", "training half", "pip install einops"),
    (
        {"torch": Found(error="ModuleNotFoundError: No module named 'torch'", broken=True)},
        "error",
        "torch is not installed",
        'pip install --upgrade "torch>=2.10"',
    ),
    (
        {"torch": Found(error="ImportError: libcudart.so.13", broken=True)},
        "error",
        "libcudart.so.13",
        "pip install --force-reinstall",
    ),
    ({"torch": Found("2.9.1+cpu")}, "error", "CVE-2026-24747", '"torch>=2.10"'),
    ({"torch": Found("main")}, "warning", "cannot be compared", '"torch>=2.10"'),
    ({"megatron": Found()}, "error", "not installed", "pip install megatron-core=="),
    ({"megatron": Found("0.16.1")}, "error", "bulletin 5881", "pip install megatron-core=="),
    ({"megatron": Found("0.18.1")}, "error", "accel supports", "pip install megatron-core=="),
    ({"megatron": Found("0.20.0rc1")}, "error", "accel supports", "pip install megatron-core=="),
    ({"megatron": Found("core-main")}, "error", "accel supports", "pip install megatron-core=="),
    (
        {"megatron": Found(None, "megatron/core", "cannot be read")},
        "error",
        "cannot be read",
        "pip install megatron-core==",
    ),
    ({"has_training": False}, "warning", "megatron.training", "pip install megatron-core=="),
    ({"device": Found(error="no cuda device")}, "error", "no cuda device", "ACCEL_DEVICE=auto"),
    ({"nvidia_driver": True}, "warning", "sees no GPU", "torch.cuda.init()"),
    ({"device": Found("cuda")}, "warning", "triton 3.6 or newer", '"triton>=3.6"'),
    ({"device": Found("npu")}, "warning", "torch-npu 2.11 or newer", '"torch-npu>=2.11"'),
    ({"native": Found(error="not built")}, "warning", "plain PyTorch", "make setup"),
    (
        {
            "device": Found("cuda"),
            "gpu": Found(error="Triton cannot be imported"),
            "packages": {"triton": Found("3.6.0")},
        },
        "warning",
        "on the GPU: Triton cannot be imported",
        "pip install triton",
    ),
    (
        {"native": Found(error="not built"), "compiler": Compiler("g++", None)},
        "warning",
        "g++ is missing",
        "apt-get install g++ && make setup",
    ),
    (
        {"native": Found(error="not built"), "compiler": Compiler("g++", "g++ (GCC) 9.4.0")},
        "warning",
        "older than 11",
        "apt-get install g++-11",
    ),
    ({"native": Found(error="SIGILL", broken=True)}, "error", "SIGILL", "make setup"),
    (
        {"native": Found(error="ACCEL_CPU_ISA must be", broken=True)},
        "error",
        "ACCEL_CPU_ISA",
        "unset ACCEL_CPU_ISA",
    ),
]


@pytest.mark.parametrize(("changes", "level", "what", "fix"), BAD)
def test_each_fault_is_one_finding_with_its_fix(
    changes: dict[str, Any], level: str, what: str, fix: str
) -> None:
    (found,) = examined(**changes)
    assert found[0] == level
    assert what in found[1]
    assert fix in found[2]


def test_every_rule_is_tested() -> None:
    fired = {r for r in findings.RULES for bad in BAD if list(r(replace(HEALTHY, **bad[0])))}
    assert fired == set(findings.RULES)


@pytest.mark.parametrize("torch", ["2.10.0a0+nv25.12", "2.10", "2.13.0.dev20260801+cpu", "3.0"])
def test_torch_versions_that_are_fine(torch: str) -> None:
    assert examined(torch=Found(torch)) == []


@pytest.mark.parametrize("version", ["", "?", "unknown", "v", None])
def test_version_that_cannot_be_read_is_neither_old_nor_new(version: str | None) -> None:
    assert at_least(version, "1.0") is None


@pytest.mark.parametrize("field", [f.name for f in fields(Facts) if f.type == "Found"])
@pytest.mark.parametrize(
    "found", [Found(), Found("?"), Found(error="x"), Found(error="", broken=True)]
)
def test_no_fact_makes_a_rule_or_the_table_fail(field: str, found: Found) -> None:
    changes: dict[str, Any] = {field: found, "packages": {}}
    odd = replace(HEALTHY, **changes)
    findings.examine(odd)
    doctor._table(odd)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 0),
        ({"native": Found(error="not built")}, 0),
        ({"torch": Found("2.9.0")}, 1),
        ({"megatron": Found("0.16.0")}, 1),
    ],
)
def test_exit_status_counts_errors_only(
    changes: dict[str, Any],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: replace(HEALTHY, **changes))
    assert main(["doctor", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (status == 0)
    assert main(["doctor"]) == status
    text = capsys.readouterr().out
    assert all(f"  fix: {f['fix']}" in text for f in report["findings"])
    assert ("nothing to fix" in text) is (not changes)


def test_doctor_on_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    report = json.loads(capfd.readouterr().out)
    assert set(report) == {"ok", "findings", *(f.name for f in fields(Facts))}
    assert status == (0 if report["ok"] else 1)
    assert report["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert report["torch"]["version"] == __import__("torch").__version__
    assert report["megatron"]["version"] in SUPPORTED_MEGATRON
    assert report["device"]["version"] in ("cpu", "cuda", "npu")
    assert set(report["cpu"]["features"]) == {"avx2", "avx512f", "avx512_bf16", "amx"}
    assert all(set(f) == {"level", "what", "fix"} for f in report["findings"])


def test_doctor_where_nothing_is_installed_and_the_environment_is_empty() -> None:
    done = bare_python("-m", "accel", "doctor", "--json")
    assert done.stderr == ""
    assert done.returncode == 1
    report = json.loads(done.stdout)
    said = " ".join(f["what"] for f in report["findings"])
    for missing in ("torch is not installed", "megatron.core is not installed", "wrapt"):
        assert missing in said


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import os; os._exit(3)", "ended with status 3"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("raise ImportError('libcudart.so.13')", "ImportError: libcudart.so.13"),
        ("1 / 0", "ZeroDivisionError"),
        ("print('hello from a library'); raise OSError('after it')", "OSError: after it"),
    ],
)
def test_torch_that_crashes_or_hangs_is_a_finding(
    body: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    found = facts.probe(["torch"], timeout=1 if "sleep" in body else 60)["torch"]
    assert error in (found.error or "")
    assert found.broken


def test_broken_interpreter_path_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "does not start" in (facts.probe(["torch"])["torch"].error or "")


@pytest.fixture
def native_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the native library is looked for instead."""
    monkeypatch.setattr(_native, "PACKAGE", tmp_path)
    _native.reason.cache_clear()
    yield tmp_path
    _native.reason.cache_clear()


def test_native_library_missing_or_broken(native_folder: Path) -> None:
    assert "no native kernels" in (probe.native().error or "")
    _native.reason.cache_clear()
    (native_folder / "_C.abi3.so").write_bytes(b"\x7fELF and then nothing")
    broken = probe.native()
    assert broken.version is None
    assert "does not load" in (broken.error or "")


@pytest.mark.parametrize(
    ("package_info", "version", "error"),
    [
        ('__version__ = "0.19.2+local.1"', "0.19.2", None),
        ("__version__ = 12", "12", None),
        ("raise RuntimeError('no')", None, "RuntimeError: no"),
        ("version = 1", None, "KeyError"),
        ("1 +", None, "SyntaxError"),
    ],
)
def test_megatron_from_the_search_path(
    package_info: str,
    version: str | None,
    error: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('the doctor must not import this')")
    (core / "package_info.py").write_text(package_info)
    for name in ("megatron", "megatron.core"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = facts.megatron()
    assert found.version == version
    assert str(tmp_path) in found.detail
    assert (error is None) == (found.error is None)
    assert (error or "") in (found.error or "")


def test_requirements_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "PACKAGE", tmp_path / "accel")
    lines = ["wrapt>=2", 'einops; extra == "megatron"', "torch>=2.10"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert facts.requirements() == ["wrapt>=2", "torch>=2.10"]
    assert facts.requirements("megatron") == ["einops"]


@pytest.mark.parametrize(
    ("requirement", "there"),
    [("pytest", True), ("pytest>=1", True), ("pytest>=9999", False), ("no-such-package", False)],
)
def test_is_a_requirement_installed(requirement: str, there: bool) -> None:
    assert facts._installed(requirement) is there


@pytest.mark.parametrize("cxx", ["", "no-such-compiler", "'unbalanced", " ", "false"])
def test_compiler_that_is_missing_or_misspelt(cxx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", "/usr/bin:/bin" if cxx == "false" else "")
    found = facts._compiler()
    assert found.version is None
    assert found.command == (cxx or "g++")
