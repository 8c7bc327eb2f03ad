"""Builds `accel/_C`, the native CPU kernels. All else about the package is in pyproject.toml.

The kernels are optional: without a compiler, or without torch at build time, the install still
succeeds, this file says what is missing, and at run time `accel.ops` says it again and uses plain
PyTorch. Build against the torch that you run: `pip install --no-build-isolation .`
"""

import os
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def sources() -> list[str]:
    csrc = ROOT / "csrc"
    files = [*sorted((csrc / "autograd").glob("*.cpp")), *sorted((csrc / "cpu").glob("*.cpp"))]
    return [os.path.relpath(file, ROOT) for file in files]


def skipped(reason: object) -> None:
    print(
        f"\naccel: the native kernels were not built; accel will run on plain PyTorch ops.\n"
        f"  why:  {reason}\n"
        "  then: pip install --no-build-isolation .   (needs torch, and g++ >= 11)\n",
        file=sys.stderr,
    )


def native_kernels() -> dict:
    """The ext_modules and cmdclass arguments of setup(); empty where nothing can be built."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        skipped(f"torch cannot be imported at build time: {error}")
        return {}

    class BuildOrSkip(BuildExtension):
        def run(self) -> None:
            try:
                super().run()
            except Exception as error:  # distutils, ninja and g++ each raise their own
                if os.environ.get("ACCEL_REQUIRE_NATIVE") == "1":
                    raise
                skipped(error)

    # GCC 12 warns about "uninitialized" values inside its own AVX-512 headers, and about passing
    # vectors between ABIs, which we do not: every function that takes one is inlined.
    warnings = ["-Wall", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi"]
    # `make asan`: every read and write is checked; slow.
    sanitize = ["-fsanitize=address", "-fno-omit-frame-pointer", "-g1", "-O1"]
    sanitize = sanitize if os.environ.get("ACCEL_SANITIZE") == "1" else []
    extension = CppExtension(
        "accel._C",
        sources(),
        include_dirs=[str(ROOT / "csrc"), str(ROOT / "csrc" / "include")],
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
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildOrSkip}}


setup(**native_kernels())
