"""What the doctor looks at. Reading a fact never fails: what cannot be read says why.

Nothing here needs more than Python itself, and nothing is patched. What loads native code (torch,
our kernels, a device) is asked in a child process by :mod:`accel.cli.probe`, so that a library that
crashes or hangs is a finding and not the end of the doctor.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import accel
from accel.cli.versions import at_least
from accel.upstream import megatron_folder, megatron_version

__all__ = [
    "Compiler", "Cpu", "Facts", "Found", "collect", "distribution", "megatron", "requirements",
]  # fmt: skip

PACKAGE = Path(accel.__file__).parent
OPTIONAL = {
    "triton": "triton",
    "transformer_engine": "transformer-engine",
    "apex": "apex",
    "torch_npu": "torch-npu",
}
"""Module -> distribution of what accel works with and without."""
CPU_FLAGS = {"avx2": "avx2", "avx512f": "avx512f", "avx512_bf16": "avx512_bf16", "amx": "amx_tile"}
"""Feature -> its flag in /proc/cpuinfo."""
NO_GPU = "no GPU visible"
"""In the detail of ``Facts.torch`` where torch sees none."""
_PROBES = ("torch", "native", "gpu", "device")
_PROBE_SECONDS = 180.0  # torch from a cold network disk takes a minute


@dataclass(frozen=True)
class Found:
    """Something with a version, or the reason why it is not there."""

    version: str | None = None
    detail: str = ""
    """Where it comes from, how it was built, why it was chosen."""
    error: str | None = None
    """It is there and does not work, or it is asked for and cannot be had."""
    broken: bool = False
    """Asking for it raised, crashed or hung, and so will a training script."""


@dataclass(frozen=True)
class Cpu:
    model: str
    physical_cores: int | None
    """Of the machine; ``usable_cpus`` counts what this process may run on."""
    usable_cpus: int
    memory_gib: float | None
    """The smaller of what the machine has and what the container may use."""
    features: dict[str, bool | None]
    """``None``: this system has no /proc/cpuinfo to read it from."""


@dataclass(frozen=True)
class Compiler:
    command: str
    """``CXX``, or g++."""
    version: str | None
    """``None``: not found, or it does not run."""


@dataclass(frozen=True)
class Facts:
    """Everything that a finding may depend on."""

    python: Found
    accel: Found
    torch: Found
    megatron: Found
    has_training: bool
    """Whether ``megatron.training`` is beside ``megatron.core``."""
    packages: dict[str, Found | None]
    """The modules of ``OPTIONAL``; absent is fine."""
    native: Found
    """The native kernels; ``version`` is the instruction set that they run with."""
    gpu: Found
    """The kernels for CUDA; ``version`` is in what they are written."""
    device: Found
    """The device runtime that would be chosen; ``version`` is its name."""
    cpu: Cpu
    compiler: Compiler
    nvidia_driver: bool
    checkout: bool
    """accel runs from its source tree, where ``make`` works."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """``accel`` and ``megatron`` -> requirements that are not installed."""


def collect() -> Facts:
    """Read everything; about as long as ``import torch`` takes."""
    answers = probe()
    return Facts(
        python=Found(platform.python_version(), sys.executable or ""),
        accel=Found(accel.__version__, str(PACKAGE)),
        torch=answers["torch"],
        megatron=megatron(),
        has_training=_spec("megatron.training") is not None,
        packages={module: package(module) for module in OPTIONAL},
        native=answers["native"],
        gpu=answers["gpu"],
        device=answers["device"],
        cpu=_cpu(),
        compiler=_compiler(),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        checkout=all((PACKAGE.parent / name).exists() for name in ("Makefile", "pyproject.toml")),
        missing={
            extra or "accel": [text for text in requirements(extra) if not _installed(text)]
            for extra in ("", "megatron")
        },
    )


def megatron() -> Found:
    """The megatron-core that ``import megatron.core`` would find, without importing it."""
    folder = megatron_folder()
    if folder is None:
        return Found()
    try:
        version = megatron_version()
    except Exception as error:  # whatever the file does: it is not ours
        return Found(None, str(folder), f"its version cannot be read: {_describe(error)}")
    try:
        installed = Path(str(metadata.distribution("megatron-core").locate_file("megatron/core")))
        wheel = installed.resolve() == folder.resolve()
    except metadata.PackageNotFoundError:
        wheel = False
    return Found(version, f"{folder}, {'installed package' if wheel else 'from the search path'}")


def package(module: str) -> Found | None:
    """An optional package, without importing it."""
    spec = _spec(module)
    if spec is None:
        return None
    where = str(Path(spec.origin).parent) if spec.origin else ""
    return Found(distribution(OPTIONAL[module]) or "unknown version", where)


def distribution(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements(extra: str = "") -> list[str]:
    """What accel itself (or its ``extra``) needs, from pyproject.toml in a checkout, else from the
    installed package."""
    project = PACKAGE.parent / "pyproject.toml"
    if project.exists() and sys.version_info >= (3, 11):
        import tomllib

        table: dict[str, Any] = tomllib.loads(project.read_text()).get("project", {})
        named: list[str] = (
            table.get("optional-dependencies", {}).get(extra, [])
            if extra
            else table.get("dependencies", [])
        )
        return named
    try:
        lines = metadata.requires("accel") or []
    except metadata.PackageNotFoundError:
        return []
    wanted = [(line.partition(";")[0].strip(), line.partition("extra ==")[2]) for line in lines]
    return [name for name, of_extra in wanted if of_extra.strip(" '\"") == extra]


def probe(names: Sequence[str] = _PROBES, timeout: float = _PROBE_SECONDS) -> dict[str, Found]:
    """Run the probes of :mod:`accel.cli.probe` in one child process; a :class:`Found` for each."""
    # The child shall see exactly the modules that this process sees, however it was started.
    code = f"import sys; sys.path[:] = {sys.path!r}; from accel.cli import probe; probe.main({list(names)!r})"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
        output, fate = done.stdout, _fate(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        output, fate = _decoded(error.stdout), f"no answer within {timeout:.0f} s"
    except OSError as error:
        output, fate = "", f"{sys.executable!r} does not start: {error}"
    answers = dict(json.loads(line) for line in output.splitlines())
    return {name: Found(**answers.get(name, {"error": fate, "broken": True})) for name in names}


def _fate(status: int, stderr: str) -> str:
    """What became of the child that owes an answer."""
    if status < 0:
        names = {s.value: s.name for s in signal.Signals}
        return f"the process that loads it was killed by {names.get(-status, f'signal {-status}')}"
    last = stderr.strip().splitlines()[-1:] or ["no message"]
    return f"the process that loads it ended with status {status}: {last[0]}"


def _decoded(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):  # a parent is missing, broken or a stub
        return None


def _installed(requirement: str) -> bool:
    found = re.match(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?", requirement)
    version = distribution(found[1]) if found else "?"
    return version is not None and not (found and found[2] and at_least(version, found[2]) is False)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _cpu() -> Cpu:
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.exists() else ""
    processors: list[dict[str, str]] = [
        dict(re.findall(r"^(.*?)\s*: *(.*)$", block, re.MULTILINE))
        for block in text.strip().split("\n\n")
    ]
    first = processors[0]
    flags = first.get("flags", first.get("Features", "")).split()
    cores = {(p.get("physical id"), p["core id"]) for p in processors if "core id" in p}
    affinity = getattr(os, "sched_getaffinity", None)
    return Cpu(
        model=first.get("model name") or platform.processor() or platform.machine(),
        physical_cores=len(cores) or None,
        usable_cpus=len(affinity(0)) if affinity else os.cpu_count() or 1,
        memory_gib=_memory_gib(),
        features={name: flag in flags if flags else None for name, flag in CPU_FLAGS.items()},
    )


def _memory_gib() -> float | None:
    try:
        from accel.machine import memory
    except ImportError:  # psutil is missing
        return None
    return round(memory()[1] / 2**30, 1)


def _compiler() -> Compiler:
    command = os.environ.get("CXX") or "g++"
    try:
        words = shlex.split(command)
        if not shutil.which(words[0]):
            return Compiler(command, None)
        done = subprocess.run(
            [*words, "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (ValueError, IndexError, OSError, subprocess.SubprocessError):
        return Compiler(command, None)
    return Compiler(command, (done.stdout.splitlines() or ["unknown version"])[0])
