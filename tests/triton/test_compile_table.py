"""Every GPU kernel compiles for every architecture, spills nothing and asks for no more than there is.

A kernel whose rows in the table are of its source and of this compiler is not compiled again, but for the
smallest of each kind, whose rows must come out the same; `make compile-table` compiles them all, and so does
`make test-all`, by ``ACCEL_TEST_COMPILE_ALL=1``. In processes of their own: this one interprets Triton.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel._triton import MODULES
from accel.testing import compile_table
from accel.testing.compile_table import (
    ARCHITECTURES,
    CUDA_ARCHITECTURES,
    Compiled,
    compile_cuda,
    cuda_sources,
    nvcc,
    recorded,
)

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "compile.json"

needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")


@pytest.mark.parametrize("name", MODULES)
def test_triton_kernels(name, tmp_path):
    rows = in_the_table(f"accel/_triton/{name}.py") or compiled_by_triton(name, tmp_path)
    assert {row.arch for row in rows} == set(ARCHITECTURES)
    assert all(row.registers > 0 for row in rows)
    assert [row.fault for row in rows if row.fault] == []


@needs_nvcc
@pytest.mark.parametrize("arch", CUDA_ARCHITECTURES)
@pytest.mark.parametrize("source", cuda_sources(), ids=lambda source: source.stem)
def test_cuda_kernels(source, arch):
    kept = in_the_table(f"csrc/cuda/{source.name}")
    rows = [row for row in kept if row.arch == arch] if kept else compile_cuda(source, arch)
    assert rows
    assert [row.fault for row in rows if row.fault] == []


def in_the_table(file: str) -> list[Compiled]:
    """The rows of what need not be compiled again."""
    again = os.environ.get("ACCEL_TEST_COMPILE_ALL") == "1"
    return [] if again else recorded(TABLE, file)


def compiled_by_triton(name: str, folder: Path) -> list[Compiled]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(ROOT / ".cache" / "triton")}
    environment.pop("TRITON_INTERPRET", None)
    output = folder / "rows.json"
    command = [sys.executable, "-m", "accel.testing.compile_table", "--only", name]
    result = subprocess.run(
        [*command, "--triton-only", "--output", output],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "triton" in json.loads(output.read_text())["compilers"]
    return recorded(output, f"accel/_triton/{name}.py")


def test_triton_compiles_what_the_table_says(tmp_path):
    """Where this fails and nobody has changed anything, the compiler has."""
    kept = recorded(TABLE, "accel/_triton/adamw.py")
    if not kept:
        pytest.skip("the table is of another Triton, so that all is compiled")
    assert compiled_by_triton("adamw", tmp_path) == kept


@needs_nvcc
def test_nvcc_compiles_what_the_table_says():
    source = next(s for s in cuda_sources() if s.stem == "moe_row_map")
    kept = recorded(TABLE, f"csrc/cuda/{source.name}")
    if not kept:
        pytest.skip("the table is of another nvcc, so that all is compiled")
    assert [row for arch in CUDA_ARCHITECTURES for row in compile_cuda(source, arch)] == kept


@needs_nvcc
def test_rows_of_another_source_or_compiler_are_none(tmp_path):
    file, path = "csrc/cuda/rope.cu", tmp_path / "rows.json"
    table = json.loads(TABLE.read_text())
    here = dict(compile_table.compilers())

    def left(compilers=here, **sources):
        kept = {"compilers": compilers, "sources": table["sources"] | sources}
        path.write_text(json.dumps(table | kept))
        return recorded(path, file)

    assert left()
    assert left(**{file: "of another source"}) == []
    assert left({**here, "nvcc": "1.0"}) == []


def test_what_is_compiled_is_what_setup_builds():
    built = re.search(
        r'^DEFAULT_CUDA_ARCHS = "(.+)"$', (ROOT / "setup.py").read_text(), re.MULTILINE
    )
    assert [f"sm_{a.removesuffix('+PTX')}" for a in built[1].split(";")] == [*CUDA_ARCHITECTURES]


def row(**changes) -> Compiled:
    fields = {"file": "f", "kernel": "k", "case": "c", "arch": "sm_90", "num_warps": 4}
    return Compiled(
        **{**fields, "registers": 40, "shared_bytes": 1024, "spill_bytes": 0, **changes}
    )


def test_faults():
    assert row().fault is None
    assert row(spill_bytes=8).fault == "f: k (c, sm_90) spills 8 bytes a thread at 40 registers"
    assert row(spill_bytes=8, excuse=(8, "runs once")).fault is None
    worse = row(spill_bytes=12, excuse=(8, "runs once")).fault
    assert worse == "f: k (c, sm_90) spills 12 bytes a thread at 40 registers, 8 are excused"
    assert "a block has 166912" in row(arch="sm_80", shared_bytes=200 << 10).fault


def test_the_table_has_no_fault_and_no_excuse_for_more_than_it_has():
    rows = json.loads(TABLE.read_text())["rows"]
    modules = {
        f"accel/_triton/{name}.py": importlib.import_module(f"accel._triton.{name}")
        for name in MODULES
    }
    excuses = {
        (file, *key): excuse
        for file, module in modules.items()
        for key, excuse in getattr(module, "MAY_SPILL", {}).items()
    }
    worst = Counter()
    for fields in rows:
        key = (fields["file"], fields["kernel"], fields["case"], fields["arch"])
        compiled = Compiled(**{**fields, "excuse": excuses.get(key)})
        assert compiled.fault is None
        allowed = excuses[key][0] if key in excuses else 0
        assert replace(compiled, spill_bytes=allowed + 4).fault
        assert fields["excuse"] == (list(excuses[key]) if key in excuses else None)
        worst[key] = max(worst[key], compiled.spill_bytes)
    assert {key: most for key, (most, _) in excuses.items()} == +worst


def test_the_table_is_of_the_sources_of_this_tree():
    sources = json.loads(TABLE.read_text())["sources"]
    files = [f"accel/_triton/{name}.py" for name in MODULES]
    files += [f"csrc/cuda/{source.name}" for source in cuda_sources()]
    assert sorted(sources) == sorted(files)
    stale = [file for file in files if sources[file] != compile_table.digest(file)]
    names = " ".join(dict.fromkeys(Path(file).stem for file in stale))
    command = (
        f"python -m accel.testing.compile_table --only {names} --output {TABLE.relative_to(ROOT)}"
    )
    assert not stale, f"run `make compile-table`, or for these alone `{command}`"


def test_cases_that_differ_in_warps_alone_are_two():
    """As those of attention's backward of rows of 64 for sm_80."""
    from types import SimpleNamespace

    kernel = SimpleNamespace(__name__="kernel")
    four, eight = (compile_table._Launch(kernel, {}, {}, {}, {"num_warps": n}) for n in (4, 8))
    assert four.key() != eight.key()


def test_a_digest_is_of_code_and_of_what_it_includes(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_table, "ROOT", tmp_path)
    monkeypatch.setattr(compile_table, "CUDA_FOLDER", tmp_path / "csrc" / "cuda")
    cpp, header, python, neighbour = (
        "csrc/cuda/a.cu",
        "csrc/include/a.h",
        "accel/_triton/a.py",
        "accel/_triton/b.py",
    )
    texts = {
        cpp: '#include "a.h"\n#include <cstdint>\nint a;  // first\n',
        header: "int b;",
        python: '"""Doc."""\nfrom accel._triton.b import x\n',
        neighbour: "x = 1  # one\n",
    }
    for file, text in texts.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)

    def changed_by(file: str, text: str) -> list[str]:
        before = {f: compile_table.digest(f) for f in (cpp, python)}
        (tmp_path / file).write_text(text)
        changed = [f for f, old in before.items() if compile_table.digest(f) != old]
        (tmp_path / file).write_text(texts[file])
        return changed

    assert changed_by(cpp, texts[cpp].replace("first", "the first")) == []
    assert changed_by(cpp, texts[cpp].replace("int a", "int c")) == [cpp]
    assert changed_by(header, "int /* of 32 bits */\n b;") == []
    assert changed_by(header, "long b;") == [cpp]
    assert changed_by(python, texts[python].replace("Doc", "Page")) == []
    assert changed_by(neighbour, 'x = (\n    1\n)\n"""One."""\n') == []
    assert changed_by(neighbour, "x = 2\n") == [python]


def test_nothing_is_compiled_by_an_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it"):
        compile_table.compile_triton()


def test_a_launch_is_described_as_triton_would_specialise_it():
    from types import SimpleNamespace as Parameter

    names = ("x", "rows", "one", "eps", "BLOCK", "nothing")
    kernel = Parameter(
        __name__="kernel",
        params=[
            Parameter(name=n, is_constexpr=n == "BLOCK", has_default=False, default=None)
            for n in names
        ],
    )
    x = torch.empty(4, dtype=torch.bfloat16, device="meta")
    made = compile_table._describe(
        kernel, (x, 2**31, 1, 1e-5), {"BLOCK": 64, "nothing": None, "num_warps": 8}
    )
    assert made.signature == {
        "x": "*bf16",
        "rows": "i64",
        "one": "constexpr",
        "eps": "fp32",
        "BLOCK": "constexpr",
        "nothing": "constexpr",
    }
    assert made.constants == {"one": 1, "BLOCK": 64, "nothing": None}
    assert set(made.attributes) == {(0,), (1,)}
    assert made.options == {"num_warps": 8}


def test_rows_of_files_that_were_not_compiled_now_stay(tmp_path):
    rope, adamw = (
        Compiled(file=file, kernel="k", case="", arch="sm_90", num_warps=None, **sizes)
        for file, sizes in {
            "csrc/cuda/rope.cu": {"registers": 8, "shared_bytes": 0, "spill_bytes": 0},
            "accel/_triton/adamw.py": {"registers": 9, "shared_bytes": 0, "spill_bytes": 0},
        }.items()
    )
    output = tmp_path / "rows.json"
    gone, old = replace(rope, file="csrc/cuda/gone.cu"), {"triton": "1", "nvcc": "1"}
    compile_table.write(output, [gone, rope, replace(adamw, registers=7)], old)
    compile_table.write(output, [adamw], {"triton": "2", "nvcc": "2"})
    table = json.loads(output.read_text())
    assert [(row["file"], row["registers"]) for row in table["rows"]] == [
        ("accel/_triton/adamw.py", 9),
        ("csrc/cuda/rope.cu", 8),
    ]
    assert table["compilers"] == {"triton": "2", "nvcc": "1"}
    assert table["sources"] == {
        row["file"]: compile_table.digest(row["file"]) for row in table["rows"]
    }


def test_a_table_is_of_one_version_of_a_compiler(tmp_path):
    output = tmp_path / "rows.json"
    sizes = {"case": "", "arch": "sm_90", "num_warps": None, "registers": 8}
    files = ("csrc/cuda/rope.cu", "csrc/cuda/adamw.cu")
    rope, adamw = (
        Compiled(file=file, kernel="k", shared_bytes=0, spill_bytes=0, **sizes) for file in files
    )
    compile_table.write(output, [rope, adamw], {"nvcc": "1"})
    before = output.read_text()
    with pytest.raises(ValueError, match="rows of nvcc 1, and this is 2: compile all"):
        compile_table.write(output, [adamw], {"nvcc": "2"})
    assert output.read_text() == before
    compile_table.write(output, [rope, adamw], {"nvcc": "2"})
    assert json.loads(output.read_text())["compilers"] == {"nvcc": "2"}


def test_a_table_of_nothing_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(compile_table, "compile_triton", lambda only: [])
    with pytest.raises(SystemExit):
        compile_table.main(["--only", "rms", "--triton-only"])
    assert "no kernels to compile in rms" in capsys.readouterr().err


def test_attention_fits_the_shared_memory_of_every_gpu():
    """Of those too that are not compiled for: it would not launch, in the first backward pass."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.triton.shared_memory"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    wanted = json.loads(result.stdout)
    assert {name.split()[0] for name in wanted} >= {"sm_80", "sm_86", "sm_89", "sm_120"}
    limit = {name: compile_table.SHARED_LIMIT[name.split()[0]] for name in wanted}
    assert {name: n for name, n in wanted.items() if n > limit[name]} == {}
