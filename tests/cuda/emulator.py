"""Builds the CUDA kernels for the CPU: csrc/cuda with its emulator in place of a GPU.

Every file becomes an object of its own in a cache folder, named by a hash of what went into it, so that a
change to one kernel costs one compilation; nvcc and the CUDA toolkit are not needed.
"""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

__all__ = ["COMPILER", "faulty_kernels", "library"]

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
OURS = (CSRC / "include", CSRC / "cuda")
CACHE = ROOT / ".cache" / "cuda_on_cpu"
COMPILER = shutil.which("g++")
# -O1: half the time of -O2 to compile, and the emulator's switches between threads cost more than
# arithmetic. setjmp between stacks is what glibc's fortified longjmp takes for a fault.
FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-U_FORTIFY_SOURCE",
    "-DACCEL_CUDA_ON_CPU",
    "-Wno-unknown-pragmas",
)


def _sources() -> list[Path]:
    folders = ("cuda/*.cu", "cuda/bindings/*.cpp", "cuda/emulator/*.cpp")
    return sorted(file for pattern in folders for file in CSRC.glob(pattern))


def _with_headers(source: Path, seen: set[Path]) -> str:
    """The text of a file and of all of ours that it includes."""
    seen.add(source)
    text = source.read_text()
    for name in re.findall(r'^#include "(.+)"', text, re.MULTILINE):
        places = (folder / name for folder in (source.parent, *OURS))
        header = next(place for place in places if place.exists())
        if header not in seen:
            text += _with_headers(header, seen)
    return text


def _includes(source: Path) -> list[str]:
    needs_torch = source.suffix == ".cpp" and source.name != "cuda_on_cpu.cpp"
    torchs = Path(torch.__file__).parent / "include"
    theirs = [torchs, torchs / "torch/csrc/api/include"] if needs_torch else []
    return [f"-I{folder}" for folder in OURS] + [f"-isystem{folder}" for folder in theirs]


def _run(command: list[str], output: Path) -> None:
    """Run a compiler that writes `output`, which appears in one piece: tests may run beside each other."""
    handle, scratch = tempfile.mkstemp(dir=CACHE, suffix=output.suffix)
    os.close(handle)
    try:
        result = subprocess.run(
            [*command, "-o", scratch], capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
        os.replace(scratch, output)
    finally:
        Path(scratch).unlink(missing_ok=True)


def _object(source: Path) -> Path:
    text = _with_headers(source, set()) + " ".join(FLAGS) + torch.__version__
    output = CACHE / f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.o"
    if not output.exists():
        command = [COMPILER or "g++", *FLAGS, *_includes(source), "-x", "c++", "-c", str(source)]
        _run(command, output)
    return output


def _linked(name: str, sources: list[Path], *libraries: str) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(_object, sources))
    names = " ".join(o.name for o in objects)
    output = CACHE / f"{name}-{hashlib.sha256(names.encode()).hexdigest()[:16]}.so"
    if not output.exists():
        _run([COMPILER or "g++", "-shared", *map(str, objects), *libraries], output)
    return output


@functools.cache  # PyTorch cannot take another one beside it, should a source change meanwhile
def library() -> Path:
    """The kernels with their bindings, built if need be; `RuntimeError` with the compiler's words."""
    folder = Path(torch.__file__).parent / "lib"
    return _linked("cuda_on_cpu", _sources(), f"-L{folder}", "-lc10", "-ltorch_cpu")


def faulty_kernels() -> Path:
    """Those of test_emulator.py, with the emulator and nothing else."""
    ours = CSRC / "cuda" / "emulator" / "cuda_on_cpu.cpp"
    return _linked("faulty", [Path(__file__).with_name("faulty_kernels.cu"), ours])
