"""A Mamba-2 layer between its projections: `OpContract`, what it keeps, and its limits on steps."""

import pytest
import torch
from torch import Tensor

from accel.ops import split_conv1d_scan, split_conv1d_scan_ref
from tests.ops.contract import Inputs, OpContract
from tests.ops.test_causal_conv1d import segments_of

HEADS, COLUMNS, GROUPS, STATE, TAPS = 4, 5, 2, 3, 4


def problem(
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    seed: int = 0,
    sizes: tuple[int, int, int, int] = (HEADS, COLUMNS, GROUPS, STATE),
) -> list[Tensor]:
    """rows, conv_weight, conv_bias, dt_bias, a, d and the first state."""
    heads, columns, groups, state = sizes
    width, channels = heads * columns, heads * columns + 2 * groups * state
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows = normal(batch, tokens, width + channels + heads)
    dt_bias = normal(heads, dtype=wide) - 3
    a = -1 - 15 * torch.rand(heads, generator=generator).to(wide)
    first = normal(batch, heads, columns, state, dtype=wide)
    return [rows, normal(channels, TAPS), normal(channels), dt_bias, a, normal(heads), first]


def layer(*tensors, **options):
    *rest, first = tensors
    return split_conv1d_scan(
        *rest,
        groups=GROUPS,
        columns=options.pop("columns", COLUMNS),
        initial_state=first,
        **options,
    )


def layer_ref(*tensors, **options):
    *rest, first = tensors
    return split_conv1d_scan_ref(
        *rest,
        groups=GROUPS,
        columns=options.pop("columns", COLUMNS),
        initial_state=first,
        **options,
    )


class TestSplitConv1dScan(OpContract):
    op = staticmethod(layer)
    ref = staticmethod(layer_ref)
    # As in the scan, whose inputs the convolution has rounded. In 16 bits its result is rounded as well,
    # before the scan and in the gradient that comes back.
    roundings = {torch.float32: 6, torch.bfloat16: 2, torch.float16: 2}

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        options = {"chunk_size": 8, "silu": seed != 2}
        options["segments"] = segments_of(2, 5, 1, 15) if seed == 1 else None
        return Inputs(problem(2, 21, dtype, seed), options)

    def large_inputs(self) -> Inputs:
        return Inputs(problem(2, 300, torch.bfloat16, sizes=(8, 32, 2, 32)), {"columns": 32})

    def opchecks(self):
        return []  # of the ops of its parts, in their files

    def test_without_its_optional_parts(self):
        rows, weight, _, dt_bias, a, _, _ = problem(2, 21, torch.float32)
        self.check(Inputs([rows, weight, None, dt_bias, a, None, None], {"chunk_size": 8}))

    def test_steps_stay_within_their_limits(self):
        """The gradient of a step that was cut is zero; softplus is the identity for large ones."""
        tensors = problem(2, 21, torch.float32)
        tensors[3] = torch.tensor([-9.0, 0.0, 25.0, 2.0])
        self.check(Inputs(tensors, {"chunk_size": 8, "dt_limit": (0.01, 1.5)}))
        self.check(Inputs(tensors, {"chunk_size": 8}))


def test_only_the_rows_and_the_states_are_kept():
    from accel.testing.bench import _peak_bytes

    tensors = problem(1, 4096, torch.bfloat16, sizes=(8, 64, 2, 64))
    leaves = [t.requires_grad_() for t in tensors]
    kept: list[Tensor] = []

    def forward():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            return layer(*leaves, columns=64)[0]

    forward()
    rows = leaves[0].numel() * 2
    states = 4096 // 64 * 8 * 64 * 64 * 4
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert sum(own.values()) <= rows + states * 1.05 + 2**16
    assert _peak_bytes(forward) < states + 3 * rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.randn(21, 60)}, r"rows must have shape .* got \[21, 60\]"),
        ({"groups": 3}, "multiple of G 3"),
        ({"columns": 9}, "P 9 and N >= 1"),
        ({"conv_weight": torch.randn(31, TAPS)}, r"conv_weight must have 32 rows .* got \[31, 4\]"),
        ({"conv_bias": torch.randn(3)}, r"bias must have shape \[32\], got \[3\]"),
        ({"dt_bias": torch.randn(3)}, r"dt_bias must have shape \[4\], got \[3\]"),
        ({"d": torch.randn(4, 2)}, r"d must have shape \[4\] or \[4, 5\], got \[4, 2\]"),
        ({"initial_state": torch.randn(2, 4)}, r"initial_state must have shape \[2, 4, 5, 3\]"),
        ({"segments": torch.zeros(2, 3, dtype=torch.int32)}, r"integers of shape \[2, 21\]"),
        ({"chunk_size": 0}, "chunk_size must be >= 1, got 0"),
        ({"dt_limit": (1.0, 0.5)}, r"dt_limit must be .* got \(1.0, 0.5\)"),
    ],
)
def test_bad_input(change, message):
    names = ("rows", "conv_weight", "conv_bias", "dt_bias", "a", "d", "initial_state")
    tensors = dict(zip(names, problem(2, 21, torch.float32), strict=True))
    with pytest.raises(ValueError, match=message):
        split_conv1d_scan(**{**tensors, "groups": GROUPS, "columns": COLUMNS, **change})


def test_autocast_changes_nothing():
    """What is computed in fp32 stays so, in both directions."""
    tensors = [t.requires_grad_() for t in problem(2, 21, torch.float32)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = layer(*tensors, chunk_size=8)
            grads = torch.autograd.grad([o.sum() for o in out], tensors)
        results.append([*out, *grads])
    assert all(map(torch.equal, *results))
