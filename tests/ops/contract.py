"""What every op owes, tested once: a test class of an op derives from `OpContract`.

An op gives its function, its reference and `inputs()`; it inherits the tests of numerics against
fp64, of gradients for any subset of inputs, of aliasing, accumulation, determinism, `opcheck`, strides of
fakes, `fullgraph` compilation and of every instruction set. What only the op can know (shapes drawn by
hypothesis, bad input, layouts) stays in its own test file.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import CrossRefFakeMode
from torch.utils._pytree import tree_leaves, tree_map_only

from accel.ops import _native
from accel.testing.distributed import attempt
from accel.testing.tolerance import assert_close_to_baseline

__all__ = [
    "LAYOUTS",
    "Inputs",
    "OpContract",
    "assert_matches",
    "change_layout",
    "laid_out",
    "needs_native",
    "run",
]

needs_native = pytest.mark.skipif(
    _native.reason() is not None, reason=f"no native kernels: {_native.reason()}"
)


class Inputs(NamedTuple):
    """One call: `op(*tensors, **options)`. Floating tensors get gradients, but for `constants`."""

    tensors: Sequence[Tensor | None]
    options: dict[str, Any] = {}
    constants: Sequence[int] = ()
    """Positions of floating tensors that have no gradient by definition."""

    def differentiable(self) -> list[int]:
        return [
            i
            for i, t in enumerate(self.tensors)
            if t is not None and t.is_floating_point() and i not in self.constants
        ]

    def to_fp64(self) -> "Inputs":
        wide = [t.double() if t is not None and t.is_floating_point() else t for t in self.tensors]
        return self._replace(tensors=wide)


def copied(x: Tensor) -> Tensor:
    """A copy that lies in memory as `x` does: a clone of what is strided, expanded or begins within its
    storage is dense and begins where an allocation starts."""
    storage = x.untyped_storage().clone()
    return x.new_empty(0).set_(storage, x.storage_offset(), x.shape, x.stride())


def run(
    op: Callable[..., Any], inputs: Inputs, wanted: Sequence[int] | None = None, seed: int = 7
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """The op's floating outputs, and the gradient of each wanted input (all, if None).

    The inputs are copied, layout kept, so an op may overwrite what it owns. The gradients flowing
    in are random, the same for every dtype.
    """
    wanted = inputs.differentiable() if wanted is None else wanted
    leaves = [t if t is None else copied(t.detach()) for t in inputs.tensors]
    for i in wanted:
        leaves[i].requires_grad_()
    # An op may write into an input: hand it something that is not a leaf.
    handed = [t if t is None else t.view_as(t) for t in leaves]
    result = op(*handed, **inputs.options)
    outputs = [
        t
        for t in (result if isinstance(result, tuple | list) else [result])
        if t is not None and t.is_floating_point()
    ]
    flowing = [t for t in outputs if t.requires_grad]
    kept = [t.detach().clone() for t in outputs]
    if not wanted:
        return kept, {}
    generator = torch.Generator().manual_seed(seed)
    dys = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in flowing]
    grads = torch.autograd.grad(flowing, [leaves[i] for i in wanted], dys)
    return kept, dict(zip(wanted, (g.detach().clone() for g in grads), strict=True))


def assert_matches(
    op: Callable[..., Any],
    ref: Callable[..., Any],
    inputs: Inputs,
    *,
    roundings: Mapping[torch.dtype, int] = MappingProxyType({}),
    magnitudes: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Outputs and gradients of `op` are at most twice as far from fp64 as those of `ref` are.

    Args:
        roundings, magnitudes: see `accel.testing.tolerance`; roundings by the dtype of the result, 1
            where it is missing; magnitudes by name: "output 0", "gradient 1" (of input 1).
    """
    got, plain = run(op, inputs), run(ref, inputs)
    # The dys that flowed in were rounded to the dtype of the outputs: the truth must see the same.
    exact = run(_with_grads_like(ref, plain[0]), inputs.to_fp64())
    named = [
        (f"output {i}", *values)
        for i, values in enumerate(zip(got[0], plain[0], exact[0], strict=True))
    ]
    named += [(f"gradient {i}", got[1][i], plain[1][i], exact[1][i]) for i in got[1]]
    for name, a, b, c in named:
        limits = {"roundings": roundings.get(a.dtype, 1), "magnitude": magnitudes.get(name)}
        assert_close_to_baseline(a, b, c, name=name, **limits)


def _with_grads_like(ref: Callable[..., Any], outputs: list[Tensor]) -> Callable[..., Any]:
    """`ref` in fp64, whose incoming gradients are rounded to the dtypes of `outputs` first."""

    def call(*tensors: Tensor, **options: Any) -> list[Tensor]:
        result = ref(*tensors, **options)
        floats = [
            t
            for t in (result if isinstance(result, tuple | list) else [result])
            if t is not None and t.is_floating_point()
        ]
        for t, like in zip(floats, outputs, strict=True):
            if t.requires_grad:
                t.register_hook(lambda dy, dtype=like.dtype: dy.to(dtype).to(dy.dtype))
        return floats

    return call


class OpContract:
    """Derive as `class TestRmsNorm(OpContract)`; the attributes are what a subclass sets."""

    op: Callable[..., Any]
    """`staticmethod(rms_norm)`"""
    ref: Callable[..., Any]
    device = "cpu"
    """Where the kernels under test run; `op` takes and gives CPU tensors all the same."""
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
    dtypes_of_calls: Sequence[torch.dtype] | None = None
    """Those of subsets of gradients, of double calls and of micro-batches, whose bits are compared; all, if
    None."""
    roundings: dict[torch.dtype, int] = {}
    """Dtype of a result -> how many roundings in a row its formula needs in it; 1 where it is missing.
    An fp32 gradient of half inputs (a weight's, say) is computed in fp32 from end to end."""

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        """A small call with ragged ends and every optional part in use."""
        raise NotImplementedError

    def large_inputs(self) -> Inputs:
        """One that several threads share; bf16."""
        raise NotImplementedError

    def opchecks(self) -> Sequence[tuple[Any, tuple]]:
        """(dispatcher op, arguments) for `torch.library.opcheck`, forward and backward."""
        raise NotImplementedError

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        return {}

    def check(self, inputs: Inputs) -> None:
        assert_matches(
            self.op,
            self.ref,
            inputs,
            roundings=self.roundings,
            magnitudes=self.magnitudes(inputs),
        )

    @needs_native
    def test_matches_fp64(self):
        for dtype in self.dtypes:
            for seed in range(3):
                self.check(self.inputs(dtype, seed))

    @needs_native
    def test_any_subset_of_gradients(self):
        for dtype in self.dtypes_of_calls or self.dtypes:
            inputs = self.inputs(dtype)
            positions = inputs.differentiable()
            _, every = run(self.op, inputs)
            for bits in range(2 ** len(positions)):
                wanted = [p for n, p in enumerate(positions) if bits >> n & 1]
                _, grads = run(self.op, inputs, wanted)
                for p in wanted:
                    assert torch.equal(grads[p], every[p]), f"{dtype}: gradient {p} of {wanted}"

    @needs_native
    def test_calls_share_no_memory(self):
        for dtype in self.dtypes_of_calls or self.dtypes:
            self.check_calls_share_no_memory(self.inputs(dtype, 0), self.inputs(dtype, 1))

    def check_calls_share_no_memory(self, first_in: Inputs, second_in: Inputs) -> None:
        def outputs(inputs: Inputs) -> list[Tensor]:
            result = self.op(
                *[t if t is None else t.clone() for t in inputs.tensors], **inputs.options
            )
            return [
                t
                for t in (result if isinstance(result, tuple | list) else [result])
                if t is not None
            ]

        first = outputs(first_in)
        kept = [t.clone() for t in first]
        second = outputs(second_in)
        for a, b in zip(first, kept, strict=True):
            assert torch.equal(a, b)
        pointers = [t.data_ptr() for t in (*first, *second) if t.numel()]
        assert len(set(pointers)) == len(pointers)

    @needs_native
    def test_gradients_accumulate_over_micro_batches(self):
        for dtype in self.dtypes_of_calls or self.dtypes:
            self.check_gradients_accumulate(self.inputs(dtype))

    def check_gradients_accumulate(self, inputs: Inputs) -> None:
        positions = inputs.differentiable()
        leaves = {p: inputs.tensors[p].detach().clone().requires_grad_() for p in positions}
        want = {p: torch.zeros_like(leaves[p]) for p in positions}
        for seed in range(4):
            handed = [
                leaves[i].view_as(leaves[i]) if i in leaves else t if t is None else t.clone()
                for i, t in enumerate(inputs.tensors)
            ]
            if self.overwrites:
                handed = [t.clone() if i in self.overwrites else t for i, t in enumerate(handed)]
            result = self.op(*handed, **inputs.options)
            flowing = [
                t
                for t in (result if isinstance(result, tuple | list) else [result])
                if t is not None and t.requires_grad
            ]
            generator = torch.Generator().manual_seed(seed)
            dys = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in flowing]
            torch.autograd.backward(flowing, dys)
            for p, grad in run(self.op, inputs, seed=seed)[1].items():
                want[p] += grad
        for p in positions:
            assert torch.equal(leaves[p].grad, want[p]), f"gradient {p}"

    overwrites: Sequence[int] = ()
    """Positions of inputs that the op overwrites in its backward."""

    @needs_native
    def test_same_bits_each_run_and_for_any_number_of_threads(self):
        inputs = self.large_inputs()
        first = run(self.op, inputs)
        threads = torch.get_num_threads()
        try:
            for num_threads in (threads, threads, 1, 3):
                torch.set_num_threads(num_threads)
                outputs, grads = run(self.op, inputs)
                for a, b in zip(
                    (*outputs, *grads.values()), (*first[0], *first[1].values()), strict=True
                ):
                    assert torch.equal(a, b)
        finally:
            torch.set_num_threads(threads)

    @needs_native
    def test_opcheck(self):
        for op, args in self.opchecks():
            torch.library.opcheck(op, args)

    @needs_native
    def test_fakes_have_the_strides_of_results(self):
        """However an argument lies: Inductor allocates and indexes by what the fake says."""
        for op, args in self.opchecks():
            for changed in _each_laid_out(op, args):
                with contextlib.suppress(ValueError), CrossRefFakeMode(_is_not_ours):
                    op(*changed)  # what it refuses needs no strides

    @needs_native
    def test_compiles_as_one_graph(self):
        inputs = self.inputs(torch.bfloat16)
        torch._dynamo.reset()
        compiled = torch.compile(self.op, fullgraph=True, backend="aot_eager")
        want, want_grads = run(self.op, inputs)
        got, got_grads = run(compiled, inputs)
        for a, b in zip((*got, *got_grads.values()), (*want, *want_grads.values()), strict=True):
            assert torch.equal(a, b)

    @needs_native
    @pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
    def test_every_instruction_set(self, isa, tmp_path):
        cls = type(self)
        program = tmp_path / "program.py"
        program.write_text(
            f"from accel.ops import _native\n"
            f"from {cls.__module__} import {cls.__qualname__} as Case\n"
            f"assert _native.isa() == {isa!r}\n"
            f"for dtype in Case.dtypes:\n"
            f"    Case().check(Case().inputs(dtype))\n"
        )
        # a process of its own, as ACCEL_CPU_ISA is read once in each
        asked = {"ACCEL_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
        status, output = attempt(1, [str(program)], environment=asked)
        if f"this CPU or build has no {isa} kernels" in output:
            pytest.skip(f"this CPU has no {isa}")
        assert status == 0, output


def _is_not_ours(op: torch._ops.OpOverload) -> bool:
    return op.namespace != "accel"


def _each_laid_out(op: torch._ops.OpOverload, args: tuple) -> Iterator[list]:
    """Copies of arguments; in each the floating tensors of one that the op only reads, in another layout."""
    for i, (argument, value) in enumerate(zip(op._schema.arguments, args, strict=False)):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written or not any(isinstance(x, Tensor) for x in tree_leaves(value)):
            continue
        for layout in LAYOUTS:
            handed = tree_map_only(Tensor, lambda x: x.detach().clone(), list(args))
            handed[i] = tree_map_only(
                Tensor,
                lambda x, layout=layout: change_layout(x, layout) if x.is_floating_point() else x,
                handed[i],
            )
            yield handed


def change_layout(x: Tensor, layout: str) -> Tensor:
    """The same values in another layout: one of LAYOUTS."""
    match layout:
        case "transposed" if x.ndim >= 2:
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        case "strided":
            return torch.stack([x, torch.zeros_like(x)], dim=-1)[..., 0]
        case "offset":  # contiguous, but not where an allocation starts
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        case "expanded" if x.ndim and x.shape[0]:
            return x[:1].expand(x.shape)
    return x


LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded")


@st.composite
def laid_out(draw) -> Tensor:
    """fp32 [T, N] or [A, B, N], contiguous or one of the ways in which it may not be."""
    num_cols = draw(st.sampled_from([0, 1, 2, 7, 16, 31, 64, 67]))
    shape = (
        *draw(st.lists(st.sampled_from([0, 1, 2, 5, 13, 17]), min_size=1, max_size=2)),
        num_cols,
    )
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return change_layout(x, draw(st.sampled_from(LAYOUTS)))
