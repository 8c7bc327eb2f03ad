"""Builds the native kernels: `accel/_C` for CPUs and, where nvcc is, `accel/_CUDA` for NVIDIA GPUs.

All else about the package is in pyproject.toml. The kernels are optional: without a compiler, or without
torch at build time, the install still succeeds, this file says what is missing, and at run time
`accel.ops` says it again and uses Triton's kernels or plain PyTorch. Build against the torch that you
run: `pip install --no-build-isolation .`

`ACCEL_CUDA_ARCHS` chooses the GPUs, by default those of "80;90;100+PTX" that nvcc knows: with "+PTX" for
later ones too. An empty value builds no `accel/_CUDA`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
DEFAULT_CUDA_ARCHS = "80;90;100+PTX"
REQUIRED = os.environ.get("ACCEL_REQUIRE_NATIVE") == "1"  # a failure to build is one of the install
# `make asan`: every read and write is checked; slow.
SANITIZE = os.environ.get("ACCEL_SANITIZE") == "1"


def sources(*patterns: str) -> list[str]:
    files = [file for pattern in patterns for file in sorted(CSRC.glob(pattern))]
    return [os.path.relpath(file, ROOT) for file in files]


def skipped(what: str, instead: str, reason: object, needs: str) -> None:
    print(
        f"\naccel: the {what} kernels were not built; accel will run on {instead}.\n"
        f"  why:  {reason}\n"
        f"  then: pip install --no-build-isolation .   (needs torch, and {needs})\n",
        file=sys.stderr,
    )


def cpu_skipped(reason: object) -> None:
    skipped("native", "plain PyTorch ops", reason, "g++ >= 11")


def cuda_skipped(reason: object) -> None:
    skipped("CUDA C++", "Triton's", reason, "nvcc of its CUDA version")


def cuda_toolkit() -> Path | None:
    """Where nvcc says that it is installed; what PATH leads to may be a script or a link."""
    root = os.environ.get("CUDA_HOME")
    nvcc = Path(root, "bin", "nvcc") if root else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    command = [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull]
    try:
        report = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    except OSError:
        return None
    top = re.search(r"^#\$ TOP=(.+)$", report, re.MULTILINE)
    return Path(top[1]).resolve() if top else None


def missing_nvcc(toolkit: Path | None) -> str | None:
    """Why the CUDA kernels cannot be built here, or None."""
    import torch

    if toolkit is None:
        return f"no nvcc: neither CUDA_HOME nor PATH leads to CUDA {torch.version.cuda}"
    report = nvcc_says(toolkit, "--version")
    found = re.search(r"release (\d+)\.", report)
    if found is None or found[1] != torch.version.cuda.split(".")[0]:
        version = found[1] if found else "an unknown version"
        return f"nvcc in {toolkit} is of CUDA {version}, torch of CUDA {torch.version.cuda}"
    return None


def nvcc_says(toolkit: Path, *options: str) -> str:
    """What nvcc prints, nothing where it does not run."""
    command = [toolkit / "bin" / "nvcc", *options]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def default_architectures(toolkit: Path) -> str:
    """Those of DEFAULT_CUDA_ARCHS that this nvcc knows, the last of them for later GPUs too."""
    known = nvcc_says(toolkit, "--list-gpu-arch").split()
    names = [name.removesuffix("+PTX") for name in DEFAULT_CUDA_ARCHS.split(";")]
    return ";".join(name for name in names if f"compute_{name}" in known) + "+PTX"


def code_for(architectures: str) -> list[str]:
    """nvcc's options for, say, "80;90a;100+PTX"."""
    options = []
    for name in architectures.split(";"):
        number = name.removesuffix("+PTX")
        options.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if name.endswith("+PTX"):
            options.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return options


def cpu_extension() -> object:
    from torch.utils.cpp_extension import CppExtension

    # GCC 12 warns about "uninitialized" values inside its own AVX-512 headers, and about passing
    # vectors between ABIs, which we do not: every function that takes one is inlined.
    warnings = ["-Wall", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi"]
    sanitize = ["-fsanitize=address", "-fno-omit-frame-pointer", "-g1", "-O1"] if SANITIZE else []
    return CppExtension(
        "accel._C",
        sources("autograd/*.cpp", "cpu/*.cpp"),
        include_dirs=[str(CSRC), str(CSRC / "include")],
        # -fopenmp makes at::parallel_for parallel. It is for the compiler only: linking it too
        # could bring a second OpenMP runtime, while libtorch_cpu, which we do link, already comes
        # with the right one. No -march: each kernel is compiled for every instruction set and
        # chosen at run time.
        extra_compile_args=[
            "-O3",
            "-std=c++20",
            "-fopenmp",
            "-fvisibility=hidden",
            *warnings,
            *sanitize,
        ],
        extra_link_args=sanitize[:1],
        py_limited_api=True,  # torch ops and no Python module: one file for all Pythons
        optional=not REQUIRED,
    )


def cuda_extension(architectures: str) -> object:
    from torch.utils.cpp_extension import CUDAExtension

    return CUDAExtension(
        "accel._CUDA",
        sources("cuda/*.cu", "cuda/bindings/*.cpp"),
        include_dirs=[str(CSRC / "cuda"), str(CSRC / "include")],
        extra_compile_args={
            "cxx": [
                "-O2",
                "-std=c++20",
                "-fvisibility=hidden",
                "-Wall",
                f'-DACCEL_CUDA_ARCHS="{architectures}"',
            ],
            # A "-gencode" of ours keeps TORCH_CUDA_ARCH_LIST out.
            "nvcc": ["-O3", "-std=c++20", *code_for(architectures)],
        },
        py_limited_api=True,
        optional=not REQUIRED,  # an editable install looks for no file of what was skipped
    )


def native_kernels() -> dict:
    """The ext_modules and cmdclass arguments of setup(); empty where nothing can be built."""
    toolkit = cuda_toolkit()
    if toolkit:
        os.environ["CUDA_HOME"] = str(toolkit)  # torch would guess, when it is imported
    try:
        from torch.utils.cpp_extension import BuildExtension
    except ImportError as error:
        if REQUIRED:
            raise
        cpu_skipped(f"torch cannot be imported at build time: {error}")
        return {}

    class BuildOrSkip(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            self.force = (
                True  # ninja knows what is up to date; without it, a library may be another torch's
            )

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:  # of what torch checks before it builds any of them
                if REQUIRED:
                    raise
                if len(self.extensions) == 1:
                    cpu_skipped(error)
                else:  # it may be about nvcc, and the CPU's need none
                    cuda_skipped(error)
                    self.extensions = self.extensions[:1]
                    self.run()

        def build_extension(self, ext: object) -> None:
            try:
                super().build_extension(ext)
            except Exception as error:  # distutils, ninja, g++ and nvcc each raise their own
                if REQUIRED:
                    raise
                (cuda_skipped if ext.name == "accel._CUDA" else cpu_skipped)(error)

    extensions = [cpu_extension()]
    if wants_cuda():
        if reason := missing_nvcc(toolkit):
            cuda_skipped(reason)
        else:
            chosen = os.environ.get("ACCEL_CUDA_ARCHS") or default_architectures(toolkit)
            extensions.append(cuda_extension(chosen))
    return {"ext_modules": extensions, "cmdclass": {"build_ext": BuildOrSkip}}


def wants_cuda() -> bool:
    """Whether this torch has any use for CUDA kernels, and nobody has said no."""
    import torch

    refused = os.environ.get("ACCEL_CUDA_ARCHS") == ""
    return torch.version.cuda is not None and not SANITIZE and not refused


setup(**native_kernels())
