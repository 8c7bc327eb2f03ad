"""What is wrong here: one function for each thing that can be, in the order in which to fix them.

A rule looks at :class:`~accel.cli.facts.Facts` alone and touches nothing, so each is tested with
made-up facts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from accel.cli.facts import NO_GPU, Facts
from accel.cli.versions import at_least
from accel.upstream import SUPPORTED_MEGATRON

__all__ = ["RULES", "Finding", "examine"]

OLDEST_TORCH = "2.10"
OLDEST_SAFE_MEGATRON = "0.17.1"
OLDEST_TORCH_NPU = "2.11"
OLDEST_TRITON = "3.6"
OLDEST_GCC = "11"


@dataclass(frozen=True)
class Finding:
    level: str
    """``error``: must be fixed, exit status 1; ``warning``: works, but not as well as it could."""
    what: str
    fix: str
    """The command that fixes it."""


Rule = Callable[[Facts], Iterator[Finding]]


def examine(facts: Facts) -> list[Finding]:
    """Every finding, in the order of ``RULES``."""
    return [finding for rule in RULES for finding in rule(facts)]


def python_version(facts: Facts) -> Iterator[Finding]:
    version = facts.python.version
    fix = "make PYTHON=python3.12 setup" if facts.checkout else "python3.12 -m venv .venv"
    if at_least(version, "3.12") is False or at_least(version, "3.14"):
        yield Finding("error", f"Python {version}: accel runs on 3.12 and 3.13", fix)


def requirements(facts: Facts) -> Iterator[Finding]:
    own_rules = ("torch", "megatron-core")
    for owner, level in (("accel", "error"), ("megatron", "warning")):
        missing = [r for r in facts.missing.get(owner, []) if not r.startswith(own_rules)]
        if missing:
            whose = "accel" if owner == "accel" else "Megatron's training half"
            yield Finding(
                level,
                f"{whose} needs {', '.join(missing)}",
                f"pip install {' '.join(_quoted(r) for r in missing)}",
            )


def torch_version(facts: Facts) -> Iterator[Finding]:
    torch, install = facts.torch, f'pip install --upgrade "torch>={OLDEST_TORCH}"'
    if torch.error and torch.error.startswith("ModuleNotFoundError: No module named 'torch'"):
        yield Finding("error", "torch is not installed", install)
    elif torch.error:
        yield Finding(
            "error",
            f"torch cannot be imported: {torch.error}",
            f'pip install --force-reinstall "torch>={OLDEST_TORCH}"',
        )
    elif (recent := at_least(torch.version, OLDEST_TORCH)) is None:
        yield _unreadable("torch", torch.version, OLDEST_TORCH)
    elif not recent:
        yield Finding(
            "error",
            f"torch {torch.version}: a checkpoint can run code although it is loaded with "
            f"weights_only=True (CVE-2026-24747, fixed in {OLDEST_TORCH})",
            install,
        )


def megatron_version(facts: Facts) -> Iterator[Finding]:
    megatron, supported = facts.megatron, SUPPORTED_MEGATRON
    install = f"pip install megatron-core=={supported[-1]}"
    if megatron.error:
        yield Finding("error", f"megatron-core at {megatron.detail}: {megatron.error}", install)
    elif megatron.version is None:
        yield Finding("error", "megatron.core is not installed", install)
    elif at_least(megatron.version, OLDEST_SAFE_MEGATRON) is False:
        yield Finding(
            "error",
            f"megatron-core {megatron.version}: loading a checkpoint can run code "
            f"(NVIDIA bulletin 5881, fixed in {OLDEST_SAFE_MEGATRON})",
            install,
        )
    elif megatron.version not in supported:
        yield Finding(
            "error",
            f"megatron-core {megatron.version}: accel supports {', '.join(supported)} and refuses "
            "others unless --accel-allow-untested-megatron is given",
            install,
        )
    if megatron.version and not facts.has_training:
        yield Finding(
            "warning",
            f"megatron.training is not beside megatron.core ({megatron.detail}): "
            "pretrain scripts cannot run",
            install,
        )


def device(facts: Facts) -> Iterator[Finding]:
    if facts.torch.error:
        return
    if facts.device.error:
        yield Finding(
            "error", f"no device runtime: {facts.device.error}", "export ACCEL_DEVICE=auto"
        )
    if facts.nvidia_driver and NO_GPU in facts.torch.detail:
        yield Finding(
            "warning",
            f"an NVIDIA driver is loaded, but torch {facts.torch.version} sees no GPU "
            f"({facts.torch.detail}): it is a CPU build, newer than the driver, or "
            "CUDA_VISIBLE_DEVICES is empty (the command says which)",
            'python -c "import torch; torch.cuda.init()"',
        )


def device_packages(facts: Facts) -> Iterator[Finding]:
    needs = (
        ("cuda", "triton", "triton", OLDEST_TRITON),
        ("npu", "torch_npu", "torch-npu", OLDEST_TORCH_NPU),
    )
    for name, module, package, oldest in needs:
        found = facts.packages.get(module)
        if facts.device.version != name or (found and at_least(found.version, oldest)):
            continue
        have = f"found {found.version}" if found else "it is not installed"
        yield Finding(
            "warning",
            f"{name} needs {package} {oldest} or newer, {have}",
            f'pip install --upgrade "{package}>={oldest}"',
        )


def native_kernels(facts: Facts) -> Iterator[Finding]:
    native, compiler = facts.native, facts.compiler
    if facts.torch.error or not native.error:
        return
    build = "make setup" if facts.checkout else "pip install --no-build-isolation ."
    if native.broken:
        fix = "unset ACCEL_CPU_ISA" if "ACCEL_CPU_ISA" in native.error else build
        yield Finding("error", f"the native kernels do not load: {native.error}", fix)
        return
    wrong = ""
    if compiler.version is None:
        build = f"apt-get install g++ && {build}"
        wrong = f"; {compiler.command} is missing or does not run"
    elif (number := _gcc(compiler.version)) and at_least(number, OLDEST_GCC) is False:
        build = f"apt-get install g++-{OLDEST_GCC} && CXX=g++-{OLDEST_GCC} {build}"
        wrong = f"; {compiler.command} {number} is older than {OLDEST_GCC}"
    yield Finding(
        "warning", f"plain PyTorch serves every op on the CPU: {native.error}{wrong}", build
    )


def cuda_kernels(facts: Facts) -> Iterator[Finding]:
    """They matter where a GPU is; `device` says so where it cannot be used."""
    if facts.torch.error or not facts.gpu.error or facts.device.version != "cuda":
        return
    variable = "ACCEL_CUDA_KERNELS"
    if facts.gpu.broken and variable in facts.gpu.error:
        what = f"the kernels of the GPU cannot be chosen: {facts.gpu.error}"
        yield Finding("error", what, f"unset {variable}")
        return
    level = "error" if facts.gpu.broken else "warning"
    what = f"plain PyTorch serves every op on the GPU: {facts.gpu.error}"
    yield Finding(level, what, "pip install triton")


RULES: tuple[Rule, ...] = (
    python_version,
    requirements,
    torch_version,
    megatron_version,
    device,
    device_packages,
    native_kernels,
    cuda_kernels,
)


def _gcc(first_line: str) -> str | None:
    """``12.2.0`` of ``g++ (Debian 12.2.0-14) 12.2.0``; ``None`` for other compilers."""
    found = re.match(r"\S*g\+\+\S* .*?(\d+\.\d+\.\d+)$", first_line)
    return found[1] if found else None


def _unreadable(name: str, version: str | None, oldest: str) -> Finding:
    return Finding(
        "warning",
        f"{name} {version}: this version cannot be compared with {oldest}, the oldest safe one",
        f'pip install --upgrade "{name}>={oldest}"',
    )


def _quoted(requirement: str) -> str:
    return f'"{requirement}"' if re.search(r"[<>=!~\[ ]", requirement) else requirement
