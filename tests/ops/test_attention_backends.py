"""The choice of attention's back end, and how each is called: by fakes, aten's schemas and its CPU kernel."""

import contextlib
import functools
import inspect
import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from accel.log import log_once
from accel.ops import _attention_backends as backends
from accel.ops import attention_ref
from accel.ops._attention_backends import BACKENDS, Arguments, Call
from accel.ops.attention import attention_gradients_ref
from tests.ops.test_attention import qkv, starts

HOPPER = Call((9, 0), torch.bfloat16, 4096, 4096, 1, 32, 8, 128, 128, right=0)
A100 = HOPPER._replace(capability=(8, 0))
PACK = HOPPER._replace(sequences=8, same_starts=True)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    caches = (
        *(backends._chosen, backends._missing, backends._mistake),
        *(log_once, backends._module),
    )
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """Say which back ends are there."""

    def only(*names: str) -> None:
        monkeypatch.setattr(
            backends,
            "_missing",
            lambda name: None if name in (*names, "triton") else "not installed",
        )

    return only


ALL = tuple(BACKENDS)


@pytest.mark.parametrize(
    ("call", "there", "chosen"),
    [
        (HOPPER, ALL, "flash4"),
        (HOPPER, ("flash3", "cudnn", "flash2", "flash"), "flash3"),
        (HOPPER, ("cudnn", "flash2", "flash"), "cudnn"),
        (HOPPER, ("flash2", "flash"), "triton"),
        (HOPPER._replace(capability=(10, 0)), ALL, "flash4"),
        (HOPPER._replace(capability=(10, 0)), ("flash3", "cudnn"), "cudnn"),
        (HOPPER._replace(capability=(12, 0)), ALL, "flash2"),
        (A100, ALL, "flash2"),
        (A100, ("flash", "cudnn"), "flash"),
        (A100, (), "triton"),
        (HOPPER._replace(dtype=torch.float32), ALL, "triton"),
        (HOPPER._replace(dropout=True), ALL, "triton"),
        (HOPPER._replace(aligned=False), ALL, "triton"),
        (HOPPER._replace(num_queries=5000), ALL, "triton"),
        (PACK, ("cudnn", "flash"), "triton"),
        (PACK, ("flash3", "cudnn"), "flash3"),
        (PACK._replace(same_starts=False), ALL, "triton"),
        (PACK._replace(capability=(8, 0)), ("flash",), "flash"),
        (PACK._replace(capability=(8, 0), sequences=17), ("flash",), "triton"),
        (HOPPER._replace(width=192), ("flash3", "cudnn"), "flash3"),
        (HOPPER._replace(width=192), ("cudnn", "flash2"), "cudnn"),
        (A100._replace(width=192), ALL, "triton"),
    ],
)
def test_the_best_that_is_there_and_takes_the_call(call, there, chosen, installed):
    installed(*there)
    decision = backends.plan(call)
    assert decision.backend == chosen
    order = backends.preference(call.capability)
    assert [name for name, _ in decision.skipped] == list(order[: order.index(chosen)])
    assert all(reason for _, reason in decision.skipped)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_triton_takes_what_no_other_does(capability):
    order = backends.preference(capability)
    assert "triton" in order
    assert set(order) <= set(BACKENDS)
    assert len(set(order)) == len(order)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("flash3", {"dtype": torch.float32}, "float32"),
        ("flash3", {"dropout": True}, "dropout"),
        ("flash3", {"num_queries": 4097}, "see no key"),
        ("flash3", {"num_keys": 0}, "see no key"),
        ("flash3", {"sequences": 3}, "see no key"),
        ("flash3", {"width": 100, "value_width": 100}, "16 bytes"),
        ("flash3", {"capability": (10, 0)}, "sm_100"),
        ("flash3", {"value_width": 64}, "rows of 128 and 64"),
        ("flash3", {"deterministic": True, "width": 256, "value_width": 256}, "deterministic"),
        ("flash3", {"deterministic": True, "width": 224, "value_width": 224}, "deterministic"),
        ("flash4", {"deterministic": True}, "deterministic_algorithms on sm_90"),
        ("flash4", {"left": 16, "right": 0}, "a window on sm_90"),
        ("flash4", {"sequences": 3, "same_starts": True}, "a pack of sequences on sm_90"),
        ("flash4", {"capability": (8, 0)}, "sm_80"),
        ("flash4", {"width": 160, "value_width": 160}, "rows of 160"),
        ("flash2", {"width": 192}, "one width"),
        ("flash2", {"capability": (7, 5)}, "sm_75"),
        (
            "flash2",
            {"capability": (8, 9), "width": 208, "value_width": 208},
            "rows of 208 on sm_89",
        ),
        ("flash2", {"sequences": 100, "same_starts": True}, "more than 16 sequences"),
        ("cudnn", {"capability": (7, 5)}, "sm_75"),
        ("cudnn", {"left": 9}, "a window"),
        ("cudnn", {"right": 3}, "a window"),
        ("cudnn", {"num_keys": 5000}, "top left"),
        ("cudnn", {"deterministic": True}, "deterministic"),
        ("cudnn", {"sequences": 3, "same_starts": True}, "a pack"),
        ("cudnn", {"width": 192, "capability": (8, 0)}, "rows of 192 and 128"),
        ("cudnn", {"num_queries": 1, "num_keys": 1}, "a single key"),
    ],
)
def test_reasons(name, change, reason):
    assert BACKENDS[name].unsupported_reason(HOPPER) is None
    assert reason in (BACKENDS[name].unsupported_reason(HOPPER._replace(**change)) or "")


def test_wide_rows_that_flash2_takes():
    rows = HOPPER._replace(width=208, value_width=208)
    assert BACKENDS["flash2"].unsupported_reason(rows) is None
    widest = rows._replace(capability=(8, 9), width=256, value_width=256)
    assert BACKENDS["flash2"].unsupported_reason(widest) is None


def test_starts_are_the_same_where_they_are_the_same_elements():
    starts = torch.tensor([0, 3, 5, 9, 12], dtype=torch.int32)
    assert backends._same_memory(starts, starts.view(5))
    assert not backends._same_memory(starts[::2], starts[:3])
    assert not backends._same_memory(starts, starts[:3])
    assert not backends._same_memory(starts, starts.clone())


def test_a_window_is_served_by_flash_alone():
    window = HOPPER._replace(left=100)
    takes = [name for name in BACKENDS if not BACKENDS[name].unsupported_reason(window)]
    assert takes == ["flash3", "flash2", "flash", "triton"]


def test_the_environment_puts_one_first(installed, monkeypatch):
    installed(*ALL)
    monkeypatch.setenv(backends.VARIABLE, "triton")
    assert backends.plan(HOPPER) == ("triton", ())
    monkeypatch.setenv(backends.VARIABLE, "cudnn")
    assert backends.plan(HOPPER).backend == "cudnn"
    refused = (("cudnn", "a pack of sequences"), ("flash4", "a pack of sequences on sm_90"))
    assert backends.plan(PACK) == ("flash3", refused)
    monkeypatch.setenv(backends.VARIABLE, "auto")
    assert backends.plan(HOPPER).backend == "flash4"


def test_an_unknown_name_is_one_error(monkeypatch):
    monkeypatch.setenv(backends.VARIABLE, "flahs")
    message = "ACCEL_ATTENTION_BACKEND='flahs': use one of auto, flash4, flash3, flash2, cudnn, flash, triton"
    with pytest.raises(ValueError, match=message):
        backends.plan(HOPPER)


def test_says_once_what_runs_and_why_not_the_others(installed, caplog):
    installed("cudnn")
    with caplog.at_level(logging.INFO, logger="accel"):
        for _ in range(3):
            assert backends._chosen(HOPPER, CPU).name == "cudnn"
        shorter = HOPPER._replace(num_queries=2048, num_keys=2048)
        assert backends._chosen(shorter, CPU).name == "cudnn"
    said = "cudnn (not flash4: not installed; not flash3: not installed)"
    assert [r.getMessage() for r in caplog.records] == [f"attention on CUDA: {said}"]
    assert backends.describe(HOPPER) == said


def test_what_was_not_tried_is_said_to_be(installed):
    installed("flash4", "cudnn")
    assert backends.describe(HOPPER) == "flash4, if a trial of it is right"
    assert backends.describe(HOPPER._replace(dropout=True)).startswith(
        "triton (not flash4: dropout "
    )


def test_packages_that_are_not_there_say_how_to_get_them():
    for name, package in (
        ("flash2", "flash-attn"),
        ("flash3", "flash-attn-3"),
        ("flash4", "flash-attn-4"),
    ):
        reason = BACKENDS[name].missing()
        if reason is not None:  # a machine may have them
            assert (
                f"pip install {package}" in reason
                or "accel knows" in reason
                or "imported" in reason
            )


def test_importing_this_imports_no_package():
    script = (
        "import sys, accel.ops._attention_backends\n"
        "absent = ('flash_attn', 'flash_attn_interface', 'triton')\n"
        "print([m for m in sys.modules if m.split('.')[0] in absent])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


# How they are called. The signatures are those of flash-attention: 2.8.x, hopper/ and cute/.


def flash2_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    assert dropout_p == softcap == 0
    assert alibi_slopes is None
    assert not return_softmax
    return (
        *dense_forward(q, k, v, softmax_scale, causal, window_size_left, window_size_right),
        None,
        None,
    )


def flash2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    window = (window_size_left, window_size_right)
    grads = dense_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal, *window)
    for into, g in zip((dq, dk, dv), grads, strict=True):
        into.copy_(g)


def flash2_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0,
):  # fmt: skip
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert cu_seqlens_q.dtype == torch.int32
    window = (window_size_left, window_size_right)
    return (
        *pack_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, *window),
        None,
        None,
    )


def flash2_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    deterministic, rng_state=None, zero_tensors=False,
):  # fmt: skip
    cu = (cu_seqlens_q, cu_seqlens_k)
    window = (window_size_left, window_size_right)
    write_pack(
        (dq, dk, dv),
        pack_backward(dout, q, k, v, out, softmax_lse, *cu, softmax_scale, causal, *window),
        cu,
    )


def flash3_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
    cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
    seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    rest = (softmax_scale, causal, window_size_left, window_size_right)
    if cu_seqlens_q is None:
        out, lse = dense_forward(q, k, v, *rest)
        out_.copy_(out)
    else:
        out, lse = pack_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest)
        write_pack((out_,), (out,), (cu_seqlens_q,))
    return out_, lse, None, None


def flash3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    rest = (softmax_scale, is_causal, window_size_left, window_size_right)
    if cu_seqlens_q is None:
        for into, g in zip(
            (dq, dk, dv), dense_backward(dout, q, k, v, out, softmax_lse, *rest), strict=True
        ):
            into.copy_(g)
        return
    cu = (cu_seqlens_q, cu_seqlens_k)
    write_pack((dq, dk, dv), pack_backward(dout, q, k, v, out, softmax_lse, *cu, *rest), cu)


def flash4_forward(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
    causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None,
    return_lse=False, out=None, lse=None,
):  # fmt: skip
    assert return_lse
    assert -1 not in (window_size_left, window_size_right)
    sides = [-1 if side is None else side for side in (window_size_left, window_size_right)]
    named = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "softmax_scale": softmax_scale,
    }
    return flash3_forward(
        q, k, v, out_=out, causal=causal, window_size_left=sides[0], window_size_right=sides[1], **named
    )  # fmt: skip


def flash4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    deterministic=False, dq=None, dk=None, dv=None,
):  # fmt: skip
    sides = [-1 if side is None else side for side in (window_size_left, window_size_right)]
    flash3_backward(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, dq=dq, dk=dk, dv=dv, is_causal=causal,
        softmax_scale=softmax_scale, window_size_left=sides[0], window_size_right=sides[1],
    )  # fmt: skip


def options_of(scale, causal, left, right):
    assert not (causal and (left, right) != (-1, -1)), "a causal mask has no window beside it"
    return {"softmax_scale": scale, "causal": causal, "window": (left, right)}


def dense_forward(q, k, v, *rest):
    """[B, S, H, D]."""
    out, lse = attention_ref(*(t.transpose(0, 1) for t in (q, k, v)), **options_of(*rest))
    return out.transpose(0, 1), lse


def dense_backward(dout, q, k, v, out, lse, *rest):
    tensors = (t.transpose(0, 1) for t in (dout, q, k, v, out))
    return [g.transpose(0, 1) for g in attention_gradients_ref(*tensors, lse, **options_of(*rest))]


def pack_forward(q, k, v, cu_q, cu_k, *rest):
    """What is after the last sequence is not written: NaN."""
    out, lse = attention_ref(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options_of(*rest))
    out[cu_q[-1] :] = torch.nan
    lse[:, cu_q[-1] :] = torch.nan
    return out, lse


def pack_backward(dout, q, k, v, out, lse, cu_q, cu_k, *rest):
    grads = attention_gradients_ref(
        dout, q, k, v, out, lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options_of(*rest)
    )
    for g, cu in zip(grads, (cu_q, cu_k, cu_k), strict=True):
        g[cu[-1] :] = torch.nan
    return grads


def write_pack(into, grads, cu):
    for t, g, c in zip(into, grads, (cu[0], cu[-1], cu[-1]), strict=False):
        t[: c[-1]] = g[: c[-1]]


FAKES = {
    "flash2": {
        "_flash_attn_forward": flash2_forward,
        "_flash_attn_varlen_forward": flash2_varlen_forward,
        "_flash_attn_backward": flash2_backward,
        "_flash_attn_varlen_backward": flash2_varlen_backward,
    },
    "flash3": {"_flash_attn_forward": flash3_forward, "_flash_attn_backward": flash3_backward},
    "flash4": {"_flash_attn_fwd": flash4_forward, "_flash_attn_bwd": flash4_backward},
}
MODULES = {"flash2": backends.FLASH_2, "flash3": backends.FLASH_3, "flash4": backends.FLASH_4}


def aten_flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert (max_q, max_k) == tuple(t.shape[0 if cum_seq_q is not None else 1] for t in (query, key))
    sides = [-1 if side is None else side for side in (window_size_left, window_size_right)]
    rest = (scale, is_causal, *sides)
    if cum_seq_q is None:
        return (*dense_forward(query, key, value, *rest), None, None, None)
    return (*pack_forward(query, key, value, cum_seq_q, cum_seq_k, *rest), None, None, None)


def aten_flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    sides = [-1 if side is None else side for side in (window_size_left, window_size_right)]
    rest = (scale, is_causal, *sides)
    if cum_seq_q is None:
        return dense_backward(grad_out, query, key, value, out, logsumexp, *rest)
    cu = (cum_seq_q, cum_seq_k)
    return pack_backward(grad_out, query, key, value, out, logsumexp, *cu, *rest)


def cudnn_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    return_debug_mask=False, *, scale=None,
):  # fmt: skip
    """PyTorch's flash attention on the CPU, whose lse has no last 1, and which knows no groups."""
    assert attn_bias is None
    assert compute_log_sumexp
    group = query.shape[1] // key.shape[1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        *(t.repeat_interleave(group, 1) for t in (key, value)),
        dropout_p,
        is_causal,
        scale=scale,
    )
    return (out, lse.unsqueeze(-1), *[None] * 7)


def cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
    max_q, max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    assert logsumexp.shape == (*query.shape[:3], 1)
    groups = key.shape[1]
    wide = (t.repeat_interleave(query.shape[1] // groups, 1) for t in (key, value))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, *wide, out, logsumexp[..., 0], dropout_p, is_causal, scale=scale
    )
    return dq, *(g.unflatten(1, (groups, -1)).sum(2) for g in (dk, dv))


ATEN = {
    "_flash_attention_forward": aten_flash_forward,
    "_flash_attention_backward": aten_flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}


@pytest.mark.parametrize("name", ATEN)
def test_fakes_of_aten_have_its_schema(name):
    """Names, order and what is by name alone; aten may have more at the end, with defaults."""
    schema = getattr(torch.ops.aten, name).default._schema.arguments
    fake = inspect.signature(ATEN[name]).parameters.values()
    positional = [p.name for p in fake if p.kind is not p.KEYWORD_ONLY]
    assert positional == [a.name for a in schema if not a.kwarg_only]
    by_name = {a.name: a for a in schema if a.kwarg_only}
    known = {p.name for p in fake if p.kind is p.KEYWORD_ONLY}
    assert known <= set(by_name)
    assert all(a.has_default_value() for a in by_name.values())


@pytest.fixture
def fakes(monkeypatch):
    """Every library, computed by the reference or by PyTorch on the CPU."""
    for name, functions in FAKES.items():
        monkeypatch.setitem(sys.modules, MODULES[name], SimpleNamespace(**functions))
    monkeypatch.setattr(backends, "_module", lambda name: sys.modules[name])
    monkeypatch.setattr(backends, "_found", lambda name: name in sys.modules)
    aten = SimpleNamespace(**ATEN)
    fake_torch = SimpleNamespace(
        **{n: getattr(torch, n) for n in dir(torch) if not n.startswith("__")}
    )
    fake_torch.ops = SimpleNamespace(aten=aten)
    monkeypatch.setattr(backends, "torch", fake_torch)


DENSE = ("cudnn", "flash2", "flash3", "flash4", "flash")
CASES = {
    "causal": (-1, 0),
    "full": (-1, -1),
    "window": (9, 0),
}


def compare(name, tensors, arguments, **options):
    out, lse = BACKENDS[name].forward(*tensors, arguments)
    scale = {"softmax_scale": arguments.scale}
    want, want_lse = attention_ref(*tensors, **scale, **options)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    grads = BACKENDS[name].backward(dout, *tensors, out, lse, arguments)
    wanted = attention_gradients_ref(dout, *tensors, want, want_lse, **scale, **options)
    for got, expected, t in zip(grads, wanted, tensors, strict=True):
        assert got.shape == t.shape
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DENSE)
def test_dense_calls(name, case, fakes):
    left, right = CASES[case]
    if name == "cudnn" and left >= 0:
        pytest.skip("cuDNN has no window here: test_reasons")
    assert BACKENDS[name].missing() is None or name == "cudnn"
    arguments = Arguments(None, None, None, 0.2, left, right, 0.0)
    compare(name, qkv(33, 33, 2, 4, 2, 16), arguments, window=(left, right))


SMALL = HOPPER._replace(heads=4, kv_heads=2, width=16, value_width=16)


@pytest.mark.parametrize(
    "change", [{}, {"right": -1}, {"left": 200}, {"num_keys": 4100}, {"sequences": 7}]
)
@pytest.mark.parametrize("name", MODULES)
def test_a_package_that_is_right_passes_its_trial(name, change, fakes):
    call = SMALL._replace(**change, same_starts="sequences" in change)
    assert backends._tried(BACKENDS[name], backends.trial_of(call), CPU) is None


def test_a_trial_is_a_small_call_of_the_same_kind():
    assert backends.trial_of(HOPPER) == HOPPER._replace(
        num_queries=320, num_keys=320, heads=8, kv_heads=2
    )
    decode = HOPPER._replace(num_queries=1, batch=7, kv_heads=32, left=9)
    assert backends.trial_of(decode) == decode._replace(
        num_queries=320, num_keys=384, batch=2, heads=2, kv_heads=2
    )
    assert backends.trial_of(decode) == backends.trial_of(decode._replace(num_keys=7))
    for call in (HOPPER, decode, PACK):
        assert not backends.trial_of(call).blind_queries


def test_a_trial_of_a_pack_has_keys_for_all_of_its_tokens():
    padded = PACK._replace(num_queries=8192, num_keys=8128, right=-1)
    assert backends.trial_of(padded).num_keys == 320


@pytest.fixture
def current(monkeypatch):
    """The stack of CUDA devices that are made current, the first of which is 0."""
    stack = [0]

    @contextlib.contextmanager
    def device(wanted):
        stack.append(wanted.index)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: stack[-1])
    return stack


@pytest.mark.parametrize(
    ("name", "device", "stack"),
    [
        ("flash2", "cuda:1", [0, 1]),
        ("flash3", "cuda:1", [0, 1]),
        ("flash4", "cuda:1", [0, 1]),
        ("flash4", "cuda:0", [0]),
        ("flash4", "cpu", [0]),
        ("cudnn", "cuda:1", [0]),
        ("triton", "cuda:1", [0]),
    ],
)
def test_packages_run_with_the_device_of_their_tensors_current(name, device, stack, current):
    """The others see to that themselves."""
    with BACKENDS[name].on(torch.device(device)):
        assert current == stack
    assert current == [0]


def test_a_trial_and_calls_are_made_on_their_device(fakes, installed, current, monkeypatch):
    installed("flash4")
    on = backends.Backend.on
    monkeypatch.setattr(
        backends.Backend, "on", lambda self, device: on(self, torch.device("cuda:1"))
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module, where = sys.modules[MODULES["flash4"]], []
    for name, function in FAKES["flash4"].items():

        def recorded(*args, name=name, function=function, **options):
            where.append((name, current[-1]))
            return function(*args, **options)

        functools.update_wrapper(recorded, function)
        monkeypatch.setattr(module, name, recorded)
    q, k, v = (t.bfloat16() for t in qkv(33, 33, 2, 4, 2, 16))
    arguments = (None, None, None, 0.25, -1, 0, 0.0)
    out, lse = backends.forward(q, k, v, *arguments)
    backends.backward(out, q, k, v, out, lse, *arguments)
    assert where == [("_flash_attn_fwd", 1), ("_flash_attn_bwd", 1)] * 2
    assert current == [0]


def test_what_comes_first_in_a_graph_is_no_package_and_is_not_kept(fakes, installed, monkeypatch):
    installed("flash4", "cudnn")
    monkeypatch.setattr(backends, "is_capturing", lambda device: True)
    assert backends._choose(SMALL, CPU).name == "cudnn"
    monkeypatch.setattr(backends, "is_capturing", lambda device: False)
    assert backends._choose(SMALL, CPU).name == "flash4"
    monkeypatch.setattr(backends, "is_capturing", lambda device: True)
    assert backends._choose(SMALL, CPU).name == "flash4", "tried before"


def _scaled_gradient(*args, dk, **options):
    flash4_backward(*args, dk=dk, **options)
    dk.mul_(1.1)


def _raising(*args, **options):
    raise AssertionError("not on this GPU\nat all")


def test_a_trial_that_has_no_memory_says_nothing_of_the_package(fakes, installed, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("full")

    installed("flash4", "flash3")
    module = sys.modules[MODULES["flash4"]]
    forward = module._flash_attn_fwd
    monkeypatch.setattr(module, "_flash_attn_fwd", full)
    with pytest.raises(torch.OutOfMemoryError):
        backends._choose(SMALL, CPU)
    monkeypatch.setattr(module, "_flash_attn_fwd", forward)
    assert backends._choose(SMALL, CPU).name == "flash4"


@pytest.mark.parametrize(
    ("function", "wrong", "reason"),
    [
        ("_flash_attn_bwd", _scaled_gradient, "its dk was off by 0.1 in a trial"),
        ("_flash_attn_bwd", lambda *args, **options: None, "its dq was off by 1 in a trial"),
        ("_flash_attn_fwd", _raising, "a trial raised AssertionError: not on this GPU"),
    ],
)
def test_a_package_that_is_wrong_is_told_and_not_used(
    function, wrong, reason, fakes, installed, monkeypatch, caplog
):
    installed("flash4", "flash3")
    # what is not written is not by chance what it should be
    monkeypatch.setattr(backends, "_results", lambda t, width, a: t.new_zeros(*t.shape[:-1], width))
    monkeypatch.setattr(sys.modules[MODULES["flash4"]], function, wrong)
    with caplog.at_level(logging.WARNING, logger="accel"):
        decision = backends.plan(SMALL, CPU)
        assert backends._chosen(SMALL, CPU).name == "flash3"
    assert decision == ("flash3", (("flash4", reason),))
    assert [r.getMessage() for r in caplog.records] == [
        f"attention on CUDA: flash4 is not used: {reason}"
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["flash2", "flash3", "flash4", "flash"])
def test_packs_whose_last_tokens_nobody_writes(name, case, fakes):
    left, right = CASES[case]
    cu = starts([20, 1, 9], torch.int64)
    tensors = [t[:, 0] for t in qkv(33, 33, 1, 4, 2, 16)]
    arguments = Arguments(cu, cu, None, 0.2, left, right, 0.0)
    compare(name, tensors, arguments, window=(left, right), cu_seqlens_q=cu, cu_seqlens_k=cu)


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_aten_takes_these_calls(name):
    """The real ops, on tensors without memory: schemas, None for tensors that are not there, layouts."""
    q, k, v = (t.to("meta", torch.bfloat16) for t in qkv(64, 64, 2, 4, 2, 64))
    arguments = Arguments(None, None, None, 0.2, -1, 0, 0.0)
    out, lse = BACKENDS[name].forward(q, k, v, arguments)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 64), torch.float32)
    grads = BACKENDS[name].backward(torch.empty_like(out), q, k, v, out, lse, arguments)
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v)]


def test_another_version_of_a_package_is_a_reason(fakes, monkeypatch):
    def changed(q, k, v, window_size=(-1, -1)):
        raise AssertionError("never called")

    monkeypatch.setattr(sys.modules[backends.FLASH_3], "_flash_attn_forward", changed)
    assert "has no out_: another version" in (BACKENDS["flash3"].missing() or "")
    monkeypatch.delattr(sys.modules[backends.FLASH_2], "_flash_attn_backward")
    assert "has no _flash_attn_backward" in (BACKENDS["flash2"].missing() or "")


def test_a_package_that_cannot_be_imported_is_a_reason(monkeypatch):
    def broken(name: str) -> ModuleType:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(backends, "_found", lambda name: True)
    monkeypatch.setattr(backends, "_module", broken)
    assert "cannot be imported: undefined symbol" in (BACKENDS["flash3"].missing() or "")


def test_an_lse_of_another_shape_is_an_error():
    q = torch.zeros(8, 2, 4, 16)
    with pytest.raises(RuntimeError, match="ACCEL_ATTENTION_BACKEND=triton"):
        backends._own_lse(torch.zeros(2, 4, 9), q)


def test_calls_are_described_without_their_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q, k, v = (t.to(torch.bfloat16) for t in qkv(32, 32, 2, 4, 2, 64))
    describe = functools.partial(backends._call, q, k, v)
    call = describe(Arguments(None, None, None, 0.1, 32, 32, 0.0))
    assert call == Call((9, 0), torch.bfloat16, 32, 32, 2, 4, 2, 64, 64)
    cu = starts([32])
    assert describe(Arguments(cu, cu, None, 0.1, -1, 0, 0.0)).same_starts
    assert not describe(Arguments(cu, cu.clone(), None, 0.1, -1, 0, 0.0)).same_starts
    assert not backends._aligned(torch.zeros(4, 9, 64, dtype=torch.bfloat16)[:, :, 1:])
    assert not backends._aligned(torch.zeros(4, 9, 63, dtype=torch.bfloat16))
    assert backends._aligned(torch.zeros(4, 9, 64, dtype=torch.bfloat16).transpose(0, 1))
