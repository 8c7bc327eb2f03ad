"""What RMSNorm and LayerNorm owe beyond `OpContract`: weights of either dtype, zero-centred or not."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accel.log import log_once
from tests.ops.contract import Inputs, OpContract, needs_native, run

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]

SHAPES = [
    (4, 64),  # whole vectors
    (3, 5, 127),  # leading dimensions, a ragged tail in every instruction set
    (1, 33),  # one row: two AVX-512 vectors and one lane
    (37, 1),  # one column: all tail
    (129, 24),  # rows that fill neither their block nor their run
    (1025, 40),  # several runs
    (160, 4096),  # rows of a real model, several threads
]


class NormContract(OpContract):
    """`op(x, *vectors_N, zero_centered=...)`."""

    num_vectors: int
    unsupported_reason: Callable[..., str | None]

    # fp32 computes in the dtype of its result. From x to y: the last steps of the sum, mean, + eps,
    # sqrt, reciprocal, three products. In bf16 and fp16 all that is below the one rounding at the end.
    roundings = {torch.float32: 8}

    def norm_inputs(
        self,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, torch.dtype],
        seed: int = 0,
        zero_centered: bool = False,
    ) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*shape, generator=generator) * 2 + 0.5
        return self.with_vectors(x.to(dtypes[0]), dtypes[1], zero_centered, generator)

    def with_vectors(
        self,
        x: Tensor,
        dtype: torch.dtype,
        zero_centered: bool,
        generator: torch.Generator | None = None,
    ) -> Inputs:
        generator = generator or torch.Generator().manual_seed(1)
        vectors = [
            (torch.randn(x.shape[-1], generator=generator) * 0.5 + 0.5).to(dtype)
            for _ in range(self.num_vectors)
        ]
        return Inputs([x, *vectors], {"zero_centered": zero_centered})

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        return self.norm_inputs((6, 3, 43), (dtype, dtype), seed, zero_centered=seed % 2 == 1)

    def large_inputs(self) -> Inputs:
        return self.norm_inputs((1025, 264), DTYPES[1])

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        """The size of the terms that cancel: r g in dx, which is 0 for N = 1, and in column sums."""
        x, *vectors = (t.double() for t in inputs.tensors)
        if x.numel() == 0:
            return {}
        eps = 1e-5
        scale = vectors[0] + 1 if inputs.options["zero_centered"] else vectors[0]
        with_bias = len(vectors) == 2
        centred = x - x.mean(-1, keepdim=True) if with_bias else x
        rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        hidden = centred.abs() + (x.abs() if with_bias else 0)
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
        rows = tuple(range(x.ndim - 1))
        sizes = {
            "output 0": (hidden * rstd * scale).abs().max()
            + (vectors[1].abs().max() if with_bias else 0),
            "gradient 0": (rstd * dy * scale).abs().max()
            * (hidden * rstd).abs().max().clamp(min=1),
            "gradient 1": (dy * hidden * rstd).abs().sum(rows).max(),
            "gradient 2": dy.abs().sum(rows).max(),
        }
        return {name: float(size) for name, size in sizes.items()}

    @needs_native
    @pytest.mark.parametrize("zero_centered", [False, True])
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_reference(self, shape, dtypes, zero_centered):
        self.check(self.norm_inputs(shape, dtypes, zero_centered=zero_centered))

    @needs_native
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize("dtypes", DTYPES, ids=str)
    def test_nan_and_inf_stay_visible(self, bad, dtypes):
        x, *vectors = self.norm_inputs((2, 19), dtypes).tensors
        x[1, 7] = bad
        y, y_ref = self.op(x, *vectors), self.ref(x, *vectors)
        assert torch.equal(y.isnan(), y_ref.isnan())

    @needs_native
    @pytest.mark.parametrize("dtypes", DTYPES[:2], ids=str)
    def test_streaming_stores_change_no_bit(self, dtypes):
        """y and dx of 16 MiB and more go past the caches; a quarter of the rows does not."""
        num_rows = 4100
        x, *vectors = self.norm_inputs((num_rows, 2048), dtypes).tensors
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x.dtype)

        def y_dx(rows: Tensor) -> list[Tensor]:
            leaf = x[rows].requires_grad_()
            y = self.op(leaf, *vectors)
            return [y.detach(), *torch.autograd.grad(y, leaf, dy[rows])]

        whole = y_dx(torch.arange(num_rows))
        for rows in torch.arange(num_rows).chunk(5):
            for a, b in zip(whole, y_dx(rows), strict=True):
                assert torch.equal(a[rows], b)

    @needs_native
    def test_second_derivative_is_an_error(self):
        x, *vectors = self.norm_inputs((2, 8), DTYPES[0]).tensors
        x.requires_grad_()
        (dx,) = torch.autograd.grad(self.op(x, *vectors).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="norm_bwd"):
            dx.sum().backward()

    @pytest.mark.parametrize(
        ("x", "vector", "message"),
        [
            (torch.ones(2, 8, dtype=torch.int64), torch.ones(8), "floating dtype, got torch.int64"),
            (torch.tensor(1.0), torch.ones(8), r"x must have shape \[..., N\], got a scalar"),
            (torch.ones(2, 7), torch.ones(8), r"weight must .* \[7\], .* \[2, 7\], got \[8\]"),
            (torch.ones(2, 8), torch.ones(8, 1), r"weight must have shape \[8\], .* got \[8, 1\]"),
            (torch.ones(2, 8), torch.ones(8).half(), "must be torch.float32 .* got torch.float16"),
            (
                torch.ones(2, 8),
                torch.ones(8).to("meta"),
                "must be on (cpu|cuda:0) like x, got meta",
            ),
        ],
    )
    def test_rejects(self, x, vector, message):
        with pytest.raises(ValueError, match=message):
            self.op(x, *[vector] * self.num_vectors)

    def test_unsupported_dtype_falls_back_and_says_so_once(self, caplog):
        x, *vectors = self.norm_inputs((4, 8), (torch.float64, torch.float64)).tensors
        reason = self.unsupported_reason(x, *vectors)
        assert "float64" in reason
        want = self.ref(*(t.to(self.device) for t in (x, *vectors))).cpu()
        log_once.cache_clear()
        with caplog.at_level(logging.WARNING, logger="accel"):
            for _ in range(2):
                assert torch.equal(self.op(x, *vectors), want)
        assert [r.message for r in caplog.records] == [
            f"{self.op.__name__}: using plain PyTorch: {reason}"
        ]

    def test_missing_library_falls_back(self, monkeypatch):
        inputs = self.norm_inputs((4, 8), DTYPES[1])
        monkeypatch.setattr(
            "accel.ops._dispatch.missing_kernel", lambda op, device_type: "no native kernels here"
        )
        assert self.unsupported_reason(*inputs.tensors) == "no native kernels here"
        (y,), grads = run(self.op, inputs)
        (y_ref,), grads_ref = run(self.ref, inputs)
        assert torch.equal(y, y_ref)
        assert all(torch.equal(grads[i], grads_ref[i]) for i in grads)
