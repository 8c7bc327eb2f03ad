"""Mamba layers of Megatron's without `mamba-ssm`: its own two paths agree, packs are sequences, tokens can be
generated one by one, and Megatron's Triton kernels, interpreted, compute what accel's ops do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.feature import Context
from accel.patches import mamba, swap_attention
from accel.patches.linear_cross_entropy import Projection
from tests.ops.contract import needs_native

from .test_fused_adamw import one_rank

TOKENS, BATCH, HIDDEN, VOCABULARY = 40, 2, 32, 96


@pytest.fixture
def rank() -> Iterator[None]:
    with one_rank():
        yield


def hybrid(pattern: str = "M", **options: Any) -> Any:
    """A `HybridModel`; the same weights each time."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    given = {
        "num_layers": len(pattern),
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 2 * HIDDEN,
        "num_attention_heads": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
        "mamba_state_dim": 16,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
    }
    config = TransformerConfig(**{**given, **options})
    return HybridModel(config, hybrid_stack_spec, VOCABULARY, TOKENS, hybrid_layer_pattern=pattern)


def mixer_of(model: Any) -> Any:
    return model.decoder.layers[0].mixer


def gradients(module: Any, x: Tensor, **options: Any) -> list[Tensor]:
    """Output, and gradients of the input and of every parameter."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y, _ = module(x, **options)
    y.sin().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def tokens(length: int = TOKENS, batch: int = BATCH) -> Tensor:
    return torch.randn(length, batch, HIDDEN, generator=torch.Generator().manual_seed(2))


def test_the_two_paths_of_upstreams_mixer_agree(rank: None) -> None:
    """That which saves memory, and that of generation, which calls torch's own convolution."""
    lean, plain = (mixer_of(hybrid(use_mamba_mem_eff_path=lean)) for lean in (True, False))
    pairs = zip(gradients(lean, tokens()), gradients(plain, tokens()), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(list(lean.parameters())) == len(gradients(lean, tokens())) - 2


def test_packed_sequences_are_sequences(rank: None) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    mixer, x, lengths = mixer_of(hybrid()), tokens(batch=1), (13, 1, 26)
    ids = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    starts = torch.tensor([0, 13, 14, 40], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    packed.seq_idx = ids[None]
    together = gradients(mixer, x, packed_seq_params=packed)
    apart = [gradients(mixer, part) for part in x.split(lengths)]
    for i, found in enumerate(together):
        parts = [each[i] for each in apart]
        expected = torch.cat(parts) if i < 2 else torch.stack(parts).sum(0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_generation_goes_on_where_the_prompt_ended(rank: None) -> None:
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.utils import InferenceMode

    model = hybrid("M*M").eval()
    ids = torch.randint(VOCABULARY, (BATCH, 12), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(12).expand(BATCH, -1)
    context = StaticInferenceContext(BATCH, TOKENS)
    with torch.inference_mode(), InferenceMode.active():
        whole = model(ids, positions, None, runtime_gather_output=True)
        logits = []
        for first, stop in ((0, 7), *((i, i + 1) for i in range(7, 12))):
            now = slice(first, stop)
            logits.append(
                model(
                    ids[:, now],
                    positions[:, now],
                    None,
                    inference_context=context,
                    runtime_gather_output=True,
                )[:, -1]
            )
            context.sequence_len_offset = stop
    for found, position in zip(logits, range(6, 12), strict=True):
        torch.testing.assert_close(found, whole[:, position], rtol=1e-4, atol=1e-5)


def test_dynamic_batches_say_what_they_need(rank: None) -> None:
    from megatron.core.ssm import mamba_mixer

    check = mamba_mixer._check_mamba_sequence_packing_support
    assert check(for_inference_not_training=False) == (True, None)
    able, why = check(for_inference_not_training=True)
    assert not able
    assert why == "generation with dynamic batches needs causal_conv1d, which is not installed"


def test_off_again_it_cannot_be_built() -> None:
    with one_rank():
        hybrid()
    with one_rank(mamba=False), pytest.raises(ImportError, match="MambaSSM is not installed"):
        hybrid()


def one_step(model: Any) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    losses = model(ids, torch.arange(TOKENS).expand(BATCH, -1), None, labels=ids.roll(-1, 1))
    losses.sum().backward()
    return losses.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@needs_native
def test_the_loss_of_a_hybrid_makes_its_logits_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Projection] = []
    loss_of = Projection.loss
    monkeypatch.setattr(Projection, "loss", lambda self, *t: made.append(self) or loss_of(self, *t))
    with one_rank():
        losses, grads = one_step(hybrid("M*-"))
    assert not made
    with one_rank(linear_cross_entropy=True):
        ours, our_grads = one_step(hybrid("M*-"))
    assert len(made) == 1
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=1e-6)
    for found, expected in zip(our_grads, grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@needs_native
def test_attention_in_a_hybrid_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_attention, "MIN_BYTES", TOKENS * HIDDEN * 4)
    with one_rank():
        losses, grads = one_step(hybrid("*M*M"))
    with one_rank(swap_attention="all"):
        model = hybrid("*M*M")
        on = swap_attention.ON.value
        one_step(model)  # the first shows what there is to swap
        model.zero_grad()
        ours, our_grads = one_step(model)
        (history,) = on._histories.values()
    assert sum(history.sizes) > 0
    assert torch.equal(ours, losses)
    assert all(map(torch.equal, our_grads, grads))


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (None, None),
        ({"hybrid_layer_pattern": "M-M*"}, None),
        ({"hybrid_override_pattern": "M*"}, None),
        ({"spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]}, None),
        ({"hybrid_layer_pattern": "*-*-", "spec": None}, "no Mamba layers"),
        ({"spec": ["local"]}, "no Mamba layers"),
        ({}, "no Mamba layers"),
    ],
)
def test_idle_without_such_layers(args: dict[str, Any] | None, reason: str | None) -> None:
    given = None if args is None else SimpleNamespace(**args)
    assert mamba.FEATURE.idle(Context("cpu", "0.19.2", given)) == reason


def test_states_of_another_dtype_are_refused() -> None:
    asked = {"hybrid_layer_pattern": "M*", "mamba_training_ssm_states_dtype": "bf16"}
    with pytest.raises(ValueError, match=r"--mamba-training-ssm-states-dtype bf16: .* are fp32"):
        mamba.prepare(Context("cpu", "0.19.2", SimpleNamespace(**asked)))
    for harmless in ({**asked, "hybrid_layer_pattern": "*"}, {"hybrid_layer_pattern": "M*"}):
        assert mamba.prepare(Context("cpu", "0.19.2", SimpleNamespace(**harmless))) == []
    assert mamba.prepare(Context("cpu", "0.19.2")) == []


def test_idle_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba.importlib.util, "find_spec", lambda name: object())
    assert mamba.FEATURE.idle(Context("cpu", "0.19.2")) == "mamba-ssm is installed"


def test_what_the_package_could_do_beyond_megatrons_calls() -> None:
    rows, weight = torch.randn(1, 4, 56), torch.randn(32, 4)
    heads = torch.rand(4)
    call = (rows, weight, None, heads, -heads, heads, 128)
    y, state = mamba.mamba_split_conv1d_scan_combined(
        *call, headdim=5, ngroups=2, return_final_states=True
    )
    assert (y.shape, state.shape) == ((1, 4, 20), (1, 4, 5, 3))
    for option in ("rmsnorm_weight", "outproj_weight"):
        with pytest.raises(ValueError, match="need mamba-ssm"):
            mamba.mamba_split_conv1d_scan_combined(*call, headdim=5, **{option: heads})
    with pytest.raises(ValueError, match="headdim must be given"):
        mamba.mamba_split_conv1d_scan_combined(*call, ngroups=2)
    with pytest.raises(ValueError, match="activation 'relu'"):
        mamba.mamba_split_conv1d_scan_combined(*call, headdim=5, ngroups=2, activation="relu")


INTERPRETED = textwrap.dedent("""
    import contextlib

    import torch
    from torch.nn.functional import softplus
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = lambda self, call, quantiles: [0.0, 0.0, 0.0]  # the first configuration will do
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.device = lambda device: contextlib.nullcontext()

    from megatron.core.ssm.ops.causal_conv1d_triton import causal_conv1d_update
    from megatron.core.ssm.ops.mamba_ssm import selective_state_update
    from megatron.core.ssm.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    from accel.ops import state_space_scan
    from accel.ops.causal_conv1d import causal_conv1d_step
    from accel.ops.state_space_scan import state_space_step
    from accel.patches import mamba

    B, S, C, W, H, P, G, N, Q = 3, 2, 8, 4, 4, 8, 2, 16, 16
    T = 40
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    def same(*pairs):
        for theirs, ours in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def twice(x):
        return x.clone(), x.clone()

    slots = torch.tensor([4, -1, 0])
    state, after = twice(normal(5, C, W)), twice(torch.zeros(5, S, C, W))
    x, w, bias = normal(B, S, C), normal(C, W), normal(C)
    theirs = causal_conv1d_update(x, state[0], w, bias, "silu", slots, after[0])
    ours = causal_conv1d_step(x, state[1], w, bias, slots=slots, states_after=after[1])
    same((theirs, ours), state, after)

    a, d, bias = -4 * torch.rand(H, generator=draw), normal(H), normal(H)

    def as_columns(heads, *shape):
        return heads.view(*heads.shape, *[1] * (len(shape))).expand(*heads.shape, *shape)

    state, after = twice(normal(5, H, P, N)), twice(torch.zeros(5, S, H, P, N))
    x, z, dt = normal(B, S, H, P), normal(B, S, H, P), normal(B, S, H)
    b, c = normal(B, S, G, N), normal(B, S, G, N)
    theirs = selective_state_update(
        state[0], x, as_columns(dt, P), as_columns(a, P, N), b, c, as_columns(d, P), z, as_columns(bias, P),
        True, slots, after[0],
    )
    ours = state_space_step(
        x, softplus(dt + bias), a, b, c, state[1], d, z, slots=slots, states_after=after[1]
    )
    same((theirs, ours), state, after)

    # a static context's tokens, [1, B, ...], on a GPU
    class OnGPU(torch.Tensor):
        device = torch.device("cuda")

    def on_cpu(kernel):
        def call(*tensors):
            return kernel(*(t.as_subclass(torch.Tensor) if isinstance(t, OnGPU) else t for t in tensors))
        return call

    tokens, taps, beside = normal(1, B, C), normal(C, W), normal(C)
    state = twice(normal(B, C, W))
    theirs = mamba.conv1d_step(on_cpu(causal_conv1d_update))(
        tokens.as_subclass(OnGPU), state[0], taps, beside, "silu", None
    )
    ours = causal_conv1d_step(tokens.transpose(0, 1), state[1], taps, beside)
    same((theirs, ours.transpose(0, 1)), state)
    state = twice(normal(B, H, P, N))
    x, z, dt = normal(1, B, H, P), normal(1, B, H, P), normal(1, B, H)
    b, c = normal(1, B, G, N), normal(1, B, G, N)
    given = x.clone()
    theirs = mamba.state_step(on_cpu(selective_state_update))(
        state[0], x.as_subclass(OnGPU), as_columns(dt, P), as_columns(a, P, N), b, c, as_columns(d, P), z,
        as_columns(bias, P), True,
    )
    assert torch.equal(x, given), "upstream's kernel writes over the first element"
    x, dt, b, c, z = (t.transpose(0, 1) for t in (x, dt, b, c, z))
    ours = state_space_step(x, softplus(dt + bias), a, b, c, state[1], d, z)
    same((theirs, ours.transpose(0, 1)), state)

    x, z, dt = normal(T, H, P), normal(T, H, P), normal(T, H)
    b, c = normal(T, G, N), normal(T, G, N)
    theirs = torch.empty_like(x)
    last = mamba_chunk_scan_combined_varlen(
        x, dt, a, b, c, Q, cu_chunk_seqlens=torch.tensor([0, 16, 32, 40], dtype=torch.int32),
        last_chunk_indices=torch.tensor([2]), seq_idx=torch.zeros(3, dtype=torch.int32), out=theirs, D=d, z=z,
        dt_bias=bias, dt_softplus=True, state_dtype=torch.float32,
    )
    ours, state = state_space_scan(
        x[None], softplus(dt + bias)[None], a, b[None], c[None], d, z[None]
    )
    same((theirs, ours[0]), (last, state))
""")


def test_megatrons_own_kernels_compute_the_same() -> None:
    """Those of generation, which Megatron carries, adapted from `mamba-ssm`'s."""
    result = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
