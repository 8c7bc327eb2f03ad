"""What `ACCEL_CUDA_KERNELS` asks for op by op, and other libraries' kernels: found, tried, told."""

import json
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel.log import log_once
from accel.ops import (
    _cuda,
    _dispatch,
    _kernel_choice,
    _launchers,
    _native,
    _peers,
    _triton,
    layer_norm,
    layer_norm_ref,
    rms_norm,
    rms_norm_ref,
)
from accel.ops._kernel_choice import VARIABLE, Choice, chosen

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "results.json"


def test_the_reason_for_cuda_is_what_was_measured():
    """Where both were: at most 6 % more of the GPU's time, and less of the host's."""
    written = [
        line.split() for line in _kernel_choice.__doc__.partition("Triton  C++")[2].splitlines()
    ]
    measured = []
    for row in json.loads(RESULTS.read_text())["ops"]:
        cuda, triton = (row["sides"].get(side, {}) for side in ("accel", "accel in Triton"))
        if "us" not in triton:
            continue
        assert cuda["us"] <= 1.06 * triton["us"]
        assert cuda["host_us"] < triton["host_us"]
        times = f"{cuda['us']:.1f} {triton['us']:.1f} {cuda['host_us']:.0f} {triton['host_us']:.0f}"
        measured.append(f"{row['op']} {row['mode']} {row['shape']} {times}".split())
    assert written[1:] == measured


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        ("", Choice("auto", {})),
        ("triton", Choice("triton", {})),
        ("rms_norm=liger", Choice("auto", {"rms_norm": "liger"})),
        ("cuda, rms_norm=apex,rope=triton", Choice("cuda", {"rms_norm": "apex", "rope": "triton"})),
    ],
)
def test_what_is_asked_for(monkeypatch, value, choice):
    monkeypatch.setenv(VARIABLE, value)
    assert chosen() == choice


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cutlass", r"must be one of auto, cuda, triton, and then OP=BACKEND.*got 'cutlass'"),
        ("rms_norm=liger,auto", "got 'auto'"),
        ("auto,", "got ''"),
        ("norm=liger", "'norm=liger' names no op; there are activation, adamw, add_rms_norm,"),
        ("rope=liger", "'rope=liger': rope can be served by triton"),
        ("rms_norm=", "'rms_norm=': rms_norm can be served by triton, liger, apex"),
        ("rms_norm=apex,rms_norm=liger", "names rms_norm twice"),
        ("attention=triton", "set ACCEL_ATTENTION_BACKEND for attention"),
    ],
)
def test_what_there_is_not_is_an_error(monkeypatch, value, message):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=message):
        chosen()


def test_every_file_of_kernels_is_in_the_table_of_contents(fake_apex):
    from accel._peers import LIBRARIES, apex, trials

    assert tuple(sorted(apex.OPS)) == LIBRARIES["apex"]
    assert {op for ops in LIBRARIES.values() for op in ops} == set(trials.TRIALS)
    assert set(_peers.PACKAGES) == set(LIBRARIES)


class FusedLayerNorm(ModuleType):
    """Apex's extension on the CPU: the checks of csrc/layer_norm_cuda.cpp at 6424da3, and its results."""

    def __init__(self) -> None:
        super().__init__("fused_layer_norm_cuda")
        self.__spec__ = SimpleNamespace(name=self.__name__)  # type: ignore[assignment]
        self.called: list[str] = []

    def _check(self, x: Tensor, shape: torch.Size, *vectors: Tensor) -> Tensor:
        """The rows of x in fp32."""
        for t in (x, *vectors):
            assert t.is_contiguous()
        for vector in vectors:  # read as what gamma is, which the result is too
            assert tuple(vector.shape) == tuple(shape) == (x.shape[-1],)
            assert vector.dtype == x.dtype
        return x.reshape(-1, x.shape[-1]).float()

    def rms_forward_affine(self, x, shape, weight, eps):
        self.called.append("rms_forward_affine")
        rows = self._check(x, shape, weight)
        rstd = (rows.square().mean(-1) + eps).rsqrt()
        return F.rms_norm(rows, shape, weight.float(), eps).to(x.dtype).view(x.shape), rstd

    def rms_backward_affine(self, dy, rstd, x, shape, weight, eps, memory_efficient):
        self.called.append("rms_backward_affine")
        rows = self._check(x, shape, weight)
        assert dy.is_contiguous()
        assert rstd.shape == rows.shape[:1]
        assert not memory_efficient
        h, g = rows * rstd[:, None], dy.view(rows.shape).float()
        gw = g * weight.float()
        dx = (gw - h * (gw * h).mean(-1, keepdim=True)) * rstd[:, None]
        return dx.to(x.dtype).view(x.shape), (g * h).sum(0).to(weight.dtype)

    def forward_affine(self, x, shape, weight, bias, eps):
        self.called.append("forward_affine")
        rows = self._check(x, shape, weight, bias)
        y = F.layer_norm(rows, shape, weight.float(), bias.float(), eps)
        rstd = (rows.var(-1, correction=0) + eps).rsqrt()
        return y.to(x.dtype).view(x.shape), rows.mean(-1), rstd

    def backward_affine(self, dy, mean, rstd, x, shape, weight, bias, eps, memory_efficient):
        self.called.append("backward_affine")
        rows = self._check(x, shape, weight, bias)
        assert dy.is_contiguous()
        assert not memory_efficient
        assert mean.shape == rstd.shape == rows.shape[:1]
        h, g = (rows - mean[:, None]) * rstd[:, None], dy.view(rows.shape).float()
        gw = g * weight.float()
        means = gw.mean(-1, keepdim=True) + h * (gw * h).mean(-1, keepdim=True)
        dx = ((gw - means) * rstd[:, None]).to(x.dtype).view(x.shape)
        return dx, (g * h).sum(0).to(weight.dtype), g.sum(0).to(bias.dtype)


@pytest.fixture
def fake_apex(monkeypatch):
    module = FusedLayerNorm()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "accel._peers.apex", raising=False)
    log_once.cache_clear()
    yield module
    sys.modules.pop("accel._peers.apex", None)


@pytest.fixture
def on_cpu(fake_apex):
    """Registers what a choice names on the CPU, before the kernels in C++."""
    _native.reason()
    libraries = []

    def register(**by_op: str) -> list[_peers.Served]:
        libraries.append(torch.library.Library("accel", "IMPL"))
        return _peers.register(Choice("auto", by_op), libraries[-1], "CPU")

    yield register
    for library in libraries:
        library._destroy()
    _dispatch.forget()


def gradients(y: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype)
    return (y, *torch.autograd.grad(y, leaves, dy))


needs_native = pytest.mark.skipif(_native.reason() is not None, reason=f"{_native.reason()}")


@needs_native
class TestApex:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("shape", [(6, 3, 43), (37,), (1, 8)], ids=str)
    def test_norms(self, on_cpu, fake_apex, shape, dtype):
        on_cpu(rms_norm="apex", layer_norm="apex")
        x, weight, bias = (torch.randn(s).to(dtype) for s in (shape, shape[-1:], shape[-1:]))
        leaves = [
            t.requires_grad_()
            for t in (x.transpose(0, -1).contiguous().transpose(0, -1), weight, bias)
        ]
        cases = (
            (rms_norm, rms_norm_ref, leaves[:2], ["rms_forward_affine", "rms_backward_affine"]),
            (layer_norm, layer_norm_ref, leaves, ["forward_affine", "backward_affine"]),
        )
        for op, ref, inputs, parts in cases:
            op(*inputs)  # with its trial
            fake_apex.called.clear()
            for got, want in zip(
                gradients(op(*inputs), *inputs), gradients(ref(*inputs), *inputs), strict=True
            ):
                assert got.dtype == dtype
                off = (got.float() - want.float()).norm() / want.float().norm()
                assert off < (0.02 if dtype.itemsize == 2 else 1e-5)
            assert fake_apex.called == parts

    @pytest.mark.parametrize(
        ("options", "weights", "reason"),
        [
            ({}, torch.float32, "weights of torch.float32 for x of torch.bfloat16"),
            ({"zero_centered": True}, torch.bfloat16, "zero-centred weights"),
            ({"eps": 1e-3}, torch.bfloat16, "64 elements, more than 63"),
        ],
    )
    def test_what_it_does_not_take(
        self, on_cpu, fake_apex, monkeypatch, caplog, options, weights, reason
    ):
        on_cpu(rms_norm="apex")
        x, weight = torch.randn(4, 16).bfloat16(), torch.randn(16).to(weights)
        rms_norm(x, x[0])
        fake_apex.called.clear()
        if "eps" in options:
            monkeypatch.setattr(sys.modules["accel._peers.apex"], "MAX_ELEMENTS", 63)
        with caplog.at_level(logging.WARNING, "accel"):
            y = rms_norm(x, weight, **options)
        torch.testing.assert_close(y, rms_norm_ref(x, weight, **options).to(y.dtype))
        assert not fake_apex.called
        assert [r.message for r in caplog.records] == [
            f"rms_norm_fwd: by accel, not by apex: {reason}"
        ]


@needs_native
class TestTrials:
    def wrong(self, fake_apex, monkeypatch, change):
        right = fake_apex.rms_backward_affine
        monkeypatch.setattr(fake_apex, "rms_backward_affine", lambda *a: change(*right(*a)))

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (
                lambda dx, dw: (dx * 1.01, dw),
                r"its dx was off by 0\.01 in a trial in torch\.float32",
            ),
            (lambda dx, dw: (dx, dw * torch.nan), r"its dweight was off by nan"),
            (
                lambda dx, dw: (dx.double(), dw),
                r"raised TypeError: its dx is torch\.float64, not torch\.float32",
            ),
            (lambda dx, dw: (dx, dw[:1]), r"its dweight was \[1\], not \[320\], in a trial"),
            (lambda dx, dw: 1 / 0, "raised ZeroDivisionError"),
        ],
    )
    def test_one_that_is_wrong_is_told_and_not_used(
        self, on_cpu, fake_apex, monkeypatch, caplog, change, reason
    ):
        self.wrong(fake_apex, monkeypatch, change)
        on_cpu(rms_norm="apex")
        x, weight = torch.randn(4, 16).requires_grad_(), torch.randn(16).requires_grad_()
        with caplog.at_level(logging.WARNING, "accel"):
            for got, want in zip(
                gradients(rms_norm(x, weight), x, weight),
                gradients(rms_norm_ref(x, weight), x, weight),
                strict=True,
            ):
                torch.testing.assert_close(got, want)
        assert len(caplog.records) == 2  # of either part
        assert re.search(reason, caplog.text)

    def test_once_for_each_device(self, on_cpu, fake_apex):
        on_cpu(rms_norm="apex")
        x, weight = torch.randn(4, 16), torch.randn(16)
        for _ in range(3):
            rms_norm(x, weight)
        assert fake_apex.called.count("rms_backward_affine") == 2 * 2, "sizes, dtypes"

    def test_where_nothing_is_recorded_for_autograd(self, on_cpu, fake_apex, caplog):
        on_cpu(rms_norm="apex")
        with torch.inference_mode(), caplog.at_level(logging.WARNING, "accel"):
            rms_norm(torch.randn(4, 16), torch.randn(16))
        assert not caplog.records
        assert fake_apex.called[-1] == "rms_forward_affine"

    def test_no_trial_while_a_graph_is_captured(self, on_cpu, fake_apex, monkeypatch):
        (served,) = on_cpu(rms_norm="apex")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        gpu = torch.device("cuda", 0)
        assert served.mistake(gpu) == "a CUDA graph is captured before it was tried"
        assert gpu not in served.mistakes


def test_a_missing_library_is_an_error(monkeypatch):
    monkeypatch.setattr(_peers.importlib.util, "find_spec", lambda name: None)
    library = torch.library.Library("accel", "IMPL")
    what = "rms_norm=liger: there is no module liger_kernel: pip install liger-kernel"
    for refuses in (
        lambda choice: _peers.register(choice, library, "CPU"),
        _peers.describe,
    ):
        with pytest.raises(RuntimeError, match=what):
            refuses(Choice("auto", {"rms_norm": "liger"}))


def test_a_library_that_cannot_be_imported_is_an_error(monkeypatch):
    monkeypatch.setattr(_peers, "_require_installed", lambda library, op: None)
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", None)
    library = torch.library.Library("accel", "IMPL")
    with pytest.raises(
        RuntimeError,
        match=r"rms_norm=apex: ModuleNotFoundError: import of .*; written for its source at 6424da3, found",
    ):
        _peers.register(Choice("auto", {"rms_norm": "apex"}), library, "CPU")


def test_the_line_at_the_start(monkeypatch):
    monkeypatch.setattr(_peers, "_require_installed", lambda library, op: None)
    monkeypatch.setattr(_peers, "_version", lambda distribution: "0.8.5")
    assert _peers.describe(Choice("triton", {})) is None
    assert (
        _peers.describe(Choice("auto", {"rms_norm": "liger", "rope": "triton"}))
        == "kernels on CUDA where accel calls the op: auto, "
        "rms_norm by liger 0.8.5, if a trial of it is right; rope by triton"
    )


class Registered(list):
    """Stands for a `torch.library.Library`: what was registered, with its file."""

    def impl(self, op, kernel, key, *, with_keyset=False, allow_override=False):
        self.append((op, kernel.__module__, key))


def test_triton_for_one_op(monkeypatch):
    library = Registered()
    monkeypatch.setattr(torch.library, "Library", lambda *args: library)
    monkeypatch.setattr(_triton, "_ASKED", [])
    _triton._by_op(Choice("auto", {"rms_norm": "triton"}))
    assert library == [
        ("accel::rms_norm_fwd", "accel._triton.rms_norm", "CUDA"),
        ("accel::rms_norm_bwd", "accel._triton.rms_norm", "CUDA"),
    ]


def test_what_needs_triton_is_an_error_without_it(monkeypatch):
    monkeypatch.setenv(VARIABLE, "rms_norm=apex")
    monkeypatch.setattr(_cuda, "reason", lambda: None)

    def missing(*args):
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(_launchers, "registered", missing)
    with pytest.raises(
        RuntimeError, match="ACCEL_CUDA_KERNELS: rms_norm: Triton cannot be imported"
    ):
        _triton.reason.__wrapped__()


def test_ops_of_the_choice_are_files():
    assert "attention" not in _kernel_choice.OPS
    assert _kernel_choice.OPS["rms_norm"] == ("triton", "liger", "apex")
