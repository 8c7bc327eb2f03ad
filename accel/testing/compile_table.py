"""Every GPU kernel compiled ahead of time, for every architecture, without a GPU.

    python -m accel.testing.compile_table [--only NAME ...] [--triton-only] [--output FILE]

Each file of `accel._triton` names calls of its launchers at shapes of real models (`compile_cases`).
The launchers run on tensors without memory, with their own choice of blocks and warps, and what they
would launch is compiled for each of ARCHITECTURES. The assembler tells registers, shared memory and
spills. A spill beyond what the file excuses (`MAY_SPILL`: kernel, case and architecture -> bytes and why) is
an error, and so is shared memory beyond what a block may have.

The CUDA C++ kernels, `csrc/cuda/*.cu`, are compiled by nvcc, where it is installed. The table keeps a digest
of what each file's rows were compiled from, so that a test tells where it is out of date.
"""

import argparse
import ast
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Compiled",
    "compile_cuda",
    "compile_triton",
    "cuda_sources",
    "digest",
    "nvcc",
    "recorded",
]

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
CUDA_ARCHITECTURES = tuple(ARCHITECTURES)  # those that setup.py builds for
SHARED_LIMIT = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}
"""Bytes of shared memory that a block may have (CUDA C++ programming guide, compute capabilities)."""
ROOT = Path(__file__).parents[2]
CUDA_FOLDER = ROOT / "csrc" / "cuda"
POINTER_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Compiled:
    """What the assembler said about one kernel of one case on one architecture."""

    file: str
    kernel: str
    case: str
    arch: str
    num_warps: int | None
    registers: int
    shared_bytes: int
    spill_bytes: int
    """Stored and loaded by each thread because its registers are full."""
    excuse: tuple[int, str] | None = None
    """How many bytes this kernel may spill at most in this case, and why."""

    @property
    def fault(self) -> str | None:
        """What makes this row an error, or None."""
        where = f"{self.file}: {self.kernel} ({self.case}, {self.arch})"
        allowed = self.excuse[0] if self.excuse else 0
        if self.spill_bytes > allowed:
            return (
                f"{where} spills {self.spill_bytes} bytes a thread at {self.registers} registers"
                + (f", {allowed} are excused" if allowed else "")
            )
        if self.shared_bytes > SHARED_LIMIT[self.arch]:
            return (
                f"{where} wants {self.shared_bytes} bytes of shared memory, "
                f"a block has {SHARED_LIMIT[self.arch]}"
            )
        return None


@dataclass(frozen=True)
class _Launch:
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list]
    options: dict[str, Any]
    """`num_warps` and the like."""

    def key(self) -> str:
        of_kernel = (self.signature, self.constants, self.attributes, self.options)
        return repr((self.kernel.__name__, *of_kernel))


def _describe(kernel: Any, args: tuple, options: dict[str, Any]) -> _Launch:
    """The launch as Triton's compiler wants it: types, constants, and what 16 divides."""
    names = [p.name for p in kernel.params]
    given = {**dict(zip(names, args, strict=False)), **options}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    for i, parameter in enumerate(kernel.params):
        if parameter.name not in given:
            if not parameter.has_default:
                raise TypeError(f"{kernel.__name__}: no {parameter.name}")
            given[parameter.name] = parameter.default
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = f"*{POINTER_TYPES[value.dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            raise TypeError(f"{kernel.__name__}: {parameter.name} is a {type(value).__name__}")
    chosen = {name: value for name, value in options.items() if name not in names}
    return _Launch(kernel, signature, constants, attributes, chosen)


def _launches(module: Any) -> Iterator[tuple[str, _Launch]]:
    """What the module's launchers launch for its cases, each kind of launch once."""
    from accel._triton.launch import instead_of_running

    seen = set()
    for case, launcher, args in module.compile_cases():
        launches: list[_Launch] = []

        def record(
            kernel: Any, grid: tuple, args: tuple, options: dict, into: list[_Launch] = launches
        ) -> None:
            into.append(_describe(kernel, args, options))

        token = instead_of_running.set(record)
        try:
            launcher(*args)
        finally:
            instead_of_running.reset(token)
        if not launches:
            raise RuntimeError(f"{module.__name__}: {case}: {launcher.__name__} launches no kernel")
        for launch in launches:
            if launch.key() not in seen:
                seen.add(launch.key())
                yield case, launch


def _number(pattern: str, text: str) -> int:
    return sum(int(n) for n in re.findall(pattern, text))


def _tool(name: str) -> str:
    """One of the programs that Triton's installation brings along."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _output(command: list[str], source: bytes, suffix: str) -> subprocess.CompletedProcess[str]:
    """Of a program that is given `source` as a file."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, f"kernel{suffix}")
        file.write_bytes(source)
        return subprocess.run([*command, str(file)], capture_output=True, text=True, check=True)


def _resources(cubin: bytes) -> str:
    """What the assembler has written into a kernel."""
    return _output([_tool("cuobjdump"), "--dump-resource-usage"], cubin, ".cubin").stdout


def _spilled(ptx: str, arch: str, fuse: bool) -> int:
    """Bytes that a thread stores and loads because its registers are full.

    A kernel with a stack may spill or not: this asks the assembler once more. `fuse`: whether products
    and sums become one instruction.
    """
    blackwell = ARCHITECTURES[arch] >= 100 and Path(_tool("ptxas-blackwell")).exists()
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    command = [_tool("ptxas-blackwell" if blackwell else "ptxas"), "-v", "-o", os.devnull]
    command += [f"--gpu-name={target[1] if target else arch}"]
    command += [] if fuse else ["--fmad=false"]
    report = _output(command, ptx.encode(), ".ptx").stderr
    return _number(r"(\d+) bytes spill (?:stores|loads)", report)


def _compile(
    file: str,
    excuses: Mapping[tuple[str, str, str], tuple[int, str]],
    case: str,
    launch: _Launch,
    arch: str,
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, name = launch.kernel, launch.kernel.__name__
    source = ASTSource(kernel, launch.signature, launch.constants, launch.attributes)
    target = GPUTarget("cuda", ARCHITECTURES[arch], 32)
    binary = triton.compile(source, target=target, options=launch.options)
    report = _resources(binary.asm["cubin"])
    spills = 0
    if _number(r"\bSTACK:(\d+)", report):
        fuse = launch.options.get("enable_fp_fusion", True)
        spills = _spilled(binary.asm["ptx"], arch, fuse)
    return Compiled(
        file=file,
        kernel=name,
        case=case,
        arch=arch,
        num_warps=binary.metadata.num_warps,
        registers=_number(r"\bREG:(\d+)", report),
        shared_bytes=binary.metadata.shared,
        spill_bytes=spills,
        excuse=excuses.get((name, case, arch)),
    )


def shared_bytes(launch: _Launch, arch: str) -> int:
    """Shared memory that a launch wants on an architecture of SHARED_LIMIT: by Triton's own passes, in a
    fraction of the time that the assembler takes."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    backend = make_backend(target)
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    options = backend.parse_options({**launch.options, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    code = source.make_ir(target, options, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    metadata: dict[str, Any] = {}
    for stage in ("ttir", "ttgir", "llir"):
        code = stages[stage](code, metadata)
    return int(metadata["shared"])


def compile_triton(only: list[str] | None = None) -> list[Compiled]:
    """Compile the Triton kernels, of the files in `only` or of all.

    Raises:
        RuntimeError: under `TRITON_INTERPRET=1`, where there is nothing to compile.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError(
            "TRITON_INTERPRET=1: kernels cannot be compiled in this process; unset it"
        )
    from accel.ops import _launchers, _triton

    jobs = []
    for module in _launchers.modules(_triton.PACKAGE):
        name = module.__name__.rpartition(".")[2]
        if only and name not in only:
            continue
        excuses = getattr(module, "MAY_SPILL", {})
        jobs += [
            (f"accel/_triton/{name}.py", excuses, case, launch, arch)
            for case, launch in _launches(module)
            for arch in ARCHITECTURES
        ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: _compile(*job), jobs))


def nvcc() -> str | None:
    """The CUDA compiler, or None."""
    from shutil import which

    return which("nvcc")


def cuda_sources() -> list[Path]:
    """The CUDA C++ kernels of the source tree; none in an installed package."""
    return sorted(CUDA_FOLDER.glob("*.cu"))


def compile_cuda(source: Path, arch: str) -> list[Compiled]:
    """Compile one CUDA C++ file with nvcc. Raises `CalledProcessError` where it does not compile."""
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("nvcc is not installed: the CUDA C++ kernels cannot be compiled")
    number = arch.removeprefix("sm_")
    include = CUDA_FOLDER.parent / "include"
    result = subprocess.run(
        [
            compiler,
            *("-cubin", "-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xptxas", "-v"),
            f"-gencode=arch=compute_{number},code=sm_{number}",
            *(f"-I{include}", f"-I{CUDA_FOLDER}", str(source), "-o", os.devnull),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    parts = re.split(r"Compiling entry function '(\w+)'", result.stderr)[1:]
    return [
        Compiled(
            file=f"csrc/cuda/{source.name}",
            kernel=_readable(mangled),
            case="",
            arch=arch,
            num_warps=None,
            registers=_number(r"Used (\d+) registers", report),
            shared_bytes=_number(r"(\d+) bytes smem", report),
            spill_bytes=_number(r"(\d+) bytes spill (?:stores|loads)", report),
        )
        for mangled, report in zip(parts[::2], parts[1::2], strict=True)
    ]


def _readable(mangled: str) -> str:
    """The demangled name without its argument list, or the mangled one where c++filt is missing."""
    try:
        result = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return mangled
    name = re.sub(r"\(anonymous namespace\)::", "", result.stdout.strip())
    name = re.sub(r"\([\w:]+\)(?=\d)", "", name)  # the cast before a template's enumerator
    return re.sub(r"^void ", "", re.sub(r"\(.*\)$", "", name))


@functools.cache
def compilers() -> Mapping[str, str]:
    """What compiled: names and versions."""
    from importlib.metadata import version

    found = {"triton": version("triton")}
    if compiler := nvcc():
        report = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
        if release := re.search(r"release ([\d.]+)", report.stdout):
            found["nvcc"] = release[1]
    return found


def digest(file: str) -> str:
    """Of what is compiled for a file of the table, with the neighbours that it imports or the headers that it
    includes, and without comments, docstrings and line breaks.

    Args:
        file: say "csrc/cuda/rope.cu" or "accel/_triton/rope.py".
    """
    found: dict[Path, str] = {}
    waiting = [ROOT / file]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path], others = (_python if path.suffix == ".py" else _cpp)(path)
            waiting += others
    text = "\n".join(found[path] for path in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded(table: Path, file: str) -> list[Compiled]:
    """The rows of a file of the table, if they were compiled from the source and by the compiler that are
    here, or none: a compiler makes the same of the same."""
    kept = json.loads(table.read_text())
    name = _compiler(file)
    current = kept["sources"].get(file) == digest(file) and (
        kept["compilers"].get(name) == compilers().get(name)
    )
    rows = [row for row in kept["rows"] if row["file"] == file and current]
    return [Compiled(**{**row, "excuse": row["excuse"] and tuple(row["excuse"])}) for row in rows]


def _python(path: Path) -> tuple[str, list[Path]]:
    """The code, and the files of `accel._triton` that it imports."""
    tree, imported = ast.parse(path.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accel._triton."):
            imported.append(ROOT / f"{str(node.module).replace('.', '/')}.py")
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
    return ast.unparse(tree), imported


def _is_text(line: ast.stmt) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


def _cpp(path: Path) -> tuple[str, list[Path]]:
    """The code, and the headers of this tree that it includes."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    folders = (path.parent, CUDA_FOLDER, CUDA_FOLDER.parent / "include")
    included = []
    for name in re.findall(r'^#include "(.+)"', code, re.MULTILINE):
        included += [folder / name for folder in folders if (folder / name).exists()][:1]
    return " ".join(code.split()), included


def write(output: Path, rows: list[Compiled], versions: Mapping[str, str]) -> None:
    """Write the table: these rows, and those that it has of other files which are still there.

    Args:
        versions: of `compilers`.

    Raises:
        ValueError: rows that would stay are of another version of their compiler.
    """
    kept: dict[str, Any] = {"compilers": {}, "sources": {}, "rows": []}
    if output.exists():
        kept |= json.loads(output.read_text())
    made = {row.file for row in rows}
    others = [
        row for row in kept["rows"] if row["file"] not in made and (ROOT / row["file"]).exists()
    ]
    used = {_compiler(file): versions[_compiler(file)] for file in made}
    for name in {_compiler(row["file"]) for row in others} & used.keys():
        if kept["compilers"].get(name) != used[name]:
            raise ValueError(
                f"{output} has rows of {name} {kept['compilers'].get(name)}, and this is {used[name]}: "
                f"compile all files (without --only), or into another --output"
            )
    every = sorted([*map(asdict, rows), *others], key=lambda row: row["file"])
    lines = ",\n".join(map(json.dumps, every))
    sources = {file: digest(file) for file in made if (ROOT / file).exists()}
    sources |= {row["file"]: kept["sources"].get(row["file"], "") for row in others}
    head = json.dumps(
        {"compilers": {**kept["compilers"], **used}, "sources": dict(sorted(sources.items()))}
    )[:-1]
    output.write_text(f'{head}, "rows": [\n{lines}\n]}}\n')


def _compiler(file: str) -> str:
    return "nvcc" if file.endswith(".cu") else "triton"


def main(argv: list[str] | None = None) -> int:
    """Compile all, write the table, and print what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these files, without extension")
    parser.add_argument("--triton-only", action="store_true", help="leave csrc/cuda out")
    parser.add_argument("--output", type=Path, help="write the rows to this file as JSON")
    options = parser.parse_args(argv)
    rows = compile_triton(options.only)
    if options.triton_only:
        pass
    elif nvcc():
        chosen = [s for s in cuda_sources() if not options.only or s.stem in options.only]
        jobs = [(source, arch) for source in chosen for arch in CUDA_ARCHITECTURES]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for compiled in pool.map(lambda job: compile_cuda(*job), jobs):
                rows += compiled
    else:
        print("nvcc is not installed: csrc/cuda was not compiled", file=sys.stderr)
    if not rows:
        parser.error(f"no kernels to compile in {' '.join(options.only or ['accel/_triton'])}")
    if options.output:
        try:
            write(options.output, rows, compilers())
        except ValueError as error:
            parser.error(str(error))
    for row in rows:
        print(
            f"{row.file:32} {row.kernel:28} {row.case:24} {row.arch:7} "
            f"{row.registers:4} registers {row.shared_bytes:7} B shared {row.spill_bytes:4} B spilled"
        )
    faults = [row.fault for row in rows if row.fault]
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
