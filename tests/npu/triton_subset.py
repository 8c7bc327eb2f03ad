"""Which of the Triton kernels keep to what Triton-Ascend 3.2 documents, read off their source.

    python -m tests.npu.triton_subset          rewrites the table in docs/ascend.md

Triton-Ascend's pages (triton-lang/triton-ascend, docs/zh/triton_api) are one for each function of
`triton.language`, with the dtypes that Atlas A2 and A3 take. What has no page, and dtypes that loads
and stores do not take, is named here; whether the rest compiles, and how fast it is, only an NPU can
tell. `constexpr`, dtypes and Python's own operators need no page.
"""

import ast
import re
from pathlib import Path

__all__ = ["DOCUMENTED", "FOLDER", "PAGE", "findings", "table", "with_table"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "accel" / "_triton"
PAGE = ROOT / "docs" / "ascend.md"
BEGIN, END = "<!-- triton subset -->", "<!-- end of triton subset -->"

DOCUMENTED = frozenset(
    """
    abs advance arange argmax argmin associative_scan assume atomic_add atomic_and atomic_cas atomic_max
    atomic_min atomic_or atomic_xchg atomic_xor broadcast broadcast_to cast cat cdiv ceil clamp cos cumprod
    cumsum debug_barrier device_assert device_print div_rn dot dot_scaled erf exp exp2 expand_dims fdiv flip
    floor fma full gather histogram inline_asm_elementwise interleave join load load_tensor_descriptor log
    log2 make_block_ptr make_tensor_descriptor max max_constancy max_contiguous maximum min minimum
    multiple_of num_programs permute program_id rand randint randint4x randn range ravel reduce reshape
    rsqrt sigmoid sin softmax sort split sqrt sqrt_rn static_assert static_print static_range store
    store_tensor_descriptor sum swizzle2d trans umulhi view where xor_sum zeros zeros_like
    """.split()
)
NEED_NO_PAGE = frozenset(
    "constexpr pointer_type tensor void int1 int8 int16 int32 int64 float16 bfloat16 float32".split()
)
UNSUPPORTED_DTYPES = frozenset("uint8 uint16 uint32 uint64 float64".split())
"""Of loads and stores on A2 and A3."""
HINTS = frozenset({"cache_modifier", "eviction_policy"})
"""Arguments of loads and stores whose page says that they do not work fully."""
NOT_THERE = frozenset({"padding_option"})


def _is_kernel(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def findings(file: Path) -> dict[str, set[str]]:
    """Of the kernels in a file and of what they import from its neighbours.

    Returns:
        "names": functions of `triton.language` without a page; "dtypes": those that loads and stores do
        not take; "hints", "libdevice".
    """
    tree = ast.parse(file.read_text())
    found: dict[str, set[str]] = {
        "names": set(),
        "dtypes": set(),
        "hints": set(),
        "libdevice": set(),
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accel._triton."):
            neighbour = file.with_name((node.module or "").rpartition(".")[2] + ".py")
            if neighbour.stem != "launch":
                for kind, names in findings(neighbour).items():
                    found[kind] |= names
    for kernel in filter(_is_kernel, ast.walk(tree)):
        for node in ast.walk(kernel):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "libdevice":
                    found["libdevice"].add(node.attr)
                elif node.value.id == "tl":
                    if node.attr in UNSUPPORTED_DTYPES:
                        found["dtypes"].add(node.attr)
                    elif node.attr not in DOCUMENTED | NEED_NO_PAGE:
                        found["names"].add(node.attr)
            if isinstance(node, ast.keyword) and node.arg in HINTS | NOT_THERE:
                found["hints" if node.arg in HINTS else "names"].add(node.arg)
    return found


def _has_kernels(file: Path) -> bool:
    return any(map(_is_kernel, ast.walk(ast.parse(file.read_text()))))


def table() -> str:
    """In Markdown, one row for each file with kernels."""
    rows = ["| kernels | within the documented subset | otherwise |", "|---|---|---|"]
    for file in sorted(FOLDER.glob("*.py")):
        if not _has_kernels(file):
            continue
        found = findings(file)
        beyond = [f"`{name}` has no page" for name in sorted(found["names"] | found["libdevice"])]
        beyond += [f"{dtype} is not supported" for dtype in sorted(found["dtypes"])]
        beyond += [f"`{hint}` does not work fully" for hint in sorted(found["hints"])]
        verdict = "no" if beyond else "yes"
        rows.append(f"| {file.stem} | {verdict} | {'; '.join(beyond)} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """The page with the table as it should be."""
    block = f"{BEGIN}\n{table()}\n{END}"
    return re.sub(f"{BEGIN}.*{END}", lambda _: block, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
