"""What torch-npu's wheel says of its ops: their schemas, and which of ATen's ops it has kernels for.

Read from the yaml that torch-npu is generated from, which the wheel carries. The wheel itself cannot
be imported without CANN, and never is.
"""

import functools
import re
from pathlib import Path

import torch

__all__ = ["WHEEL", "has_kernel", "missing", "schema_of", "version"]

WHEEL = Path(__file__).parents[2] / ".venv" / "torch-npu"
YAML = WHEEL / "torch_npu" / "csrc" / "aten" / "npu_native_functions_by_codegen.yaml"

FOR_EVERY_DEVICE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
"""Keys of the kernels by which ATen makes an op of others."""
OF_THE_OUT_VARIANT = "CompositeExplicitAutogradNonFunctional"
"""Key of the kernels by which ATen makes a structured op, new or in place, of its `.out` variant."""


def missing() -> str | None:
    """Why there is nothing to read, or None."""
    if YAML.is_file():
        return None
    return "no torch-npu wheel in .venv/torch-npu, whose schemas these tests read: run make setup"


@functools.cache
def version() -> str:
    """Of the wheel, say "2.13.0"."""
    (folder,) = WHEEL.glob("torch_npu-*.dist-info")
    return folder.name.removeprefix("torch_npu-").removesuffix(".dist-info")


@functools.cache
def _sections() -> dict[str, list[str]]:
    """What each section names, in order: schemas or names of ops."""
    sections: dict[str, list[str]] = {}
    for line in YAML.read_text().splitlines():
        if heading := re.fullmatch(r"(\w+):.*", line):
            current = sections.setdefault(heading[1], [])
        elif entry := re.fullmatch(r"(?:- |  )func: (.+)|- ([\w.]+)", line):
            current.append((entry[1] or entry[2]).strip("'\""))
    return sections


@functools.cache
def _by_name(section: str) -> dict[str, str]:
    return {schema.partition("(")[0]: schema for schema in _sections()[section]}


def schema_of(name: str) -> str:
    """Of an op of torch-npu's own, say `npu_swiglu(Tensor self, int dim=-1) -> Tensor`.

    Args:
        name: with the overload, if it has one: `npu_apply_adam_w.out`.

    Raises:
        KeyError: torch-npu has no such op.
    """
    return _by_name("custom")[name]


def has_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether an op of ATen runs on an NPU: torch-npu names it, or ATen makes it of others."""
    keys = torch._C.DispatchKey
    if any(op.has_kernel_for_dispatch_key(getattr(keys, key)) for key in FOR_EVERY_DEVICE):
        return True
    supported = _by_name("supported")
    base, _, overload = op.name().removeprefix("aten::").partition(".")
    if (f"{base}.{overload}" if overload else base) in supported:
        return True
    out = base.removesuffix("_") + (f".{overload}_out" if overload else ".out")
    return out in supported and op.has_kernel_for_dispatch_key(getattr(keys, OF_THE_OUT_VARIANT))
