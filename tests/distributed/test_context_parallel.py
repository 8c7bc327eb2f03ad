"""Sequences split over 2 and 4 ranks against one rank with all of them: results and gradients, each way of
sharing, packed or not, and bad input."""

from __future__ import annotations

import functools
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accel
from accel.layers.attention import DotProductAttention
from accel.log import log_once
from accel.ops import attention_ref
from accel.ops.attention import dropout_mask_ref
from accel.parallel import collectives
from accel.parallel.context import (
    RING,
    Attention,
    ContextGroups,
    Ring,
    RingSettings,
    context_attention,
    documents_of,
    owners,
    ring_settings,
)
from accel.parallel.context.heads import HeadShares, gather_tokens, scatter_tokens
from accel.patches import context_parallel
from accel.testing.distributed import under_torchrun

HEADS, WIDTH_QK, WIDTH_V, BATCH = 4, 24, 16, 2
STARTS = [0, 16, 24, 64]
"""Of the packed sequences; each a multiple of 2 x 4."""
TOKENS = STARTS[-1]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def enabled(gloo_group: None) -> None:
    if under_torchrun():
        accel.enable(preset="fast")


def groups(comm_type: str) -> Any:
    """For `a2a+p2p` pairs of neighbours, and those across."""
    world = dist.get_world_size()
    if comm_type != "a2a+p2p":
        return dist.group.WORLD
    pairs = [dist.new_group([r, r + 1]) for r in range(0, world, 2)]
    across = [dist.new_group(list(range(r, world, 2))) for r in range(2)]
    return [pairs[dist.get_rank() // 2], across[dist.get_rank() % 2]]


def whole(dtype: torch.dtype, kv_heads: int, *leading: int, heads: int = HEADS) -> list[Tensor]:
    """q, k, v and the gradient of the result, the same on each rank."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((heads, WIDTH_QK), (kv_heads, WIDTH_QK), (kv_heads, WIDTH_V), (heads, WIDTH_V))
    return [torch.randn(*leading, *size, generator=generator).to(dtype) for size in sizes]


def on_one_rank(
    tensors: list[Tensor], dtype: torch.dtype, *, offset: Tensor | None = None, **mask: Any
) -> list[Tensor]:
    learnt = [] if offset is None else [offset.to(dtype).requires_grad_()]
    q, k, v = (t.to(dtype).requires_grad_() for t in tensors[:3])
    out, _ = attention_ref(q, k, v, offset=learnt[0] if learnt else None, **mask)
    return [out, *torch.autograd.grad(out, (q, k, v, *learnt), tensors[3].to(dtype))]


def check(
    comm_type: str,
    dtype: torch.dtype,
    kv_heads: int,
    mask: dict[str, Any],
    packed: bool,
    *,
    heads: int = HEADS,
    documents: Tensor | None = None,
    exchange: Any = None,
    ring: Ring | None = None,
    offset: Tensor | None = None,
) -> None:
    """All of the ranks' `context_attention` against one rank's attention in fp64, and in the same dtype."""
    leading = (TOKENS,) if packed else (TOKENS, BATCH)
    tensors = whole(dtype, kv_heads, *leading, heads=heads)
    starts = torch.tensor(STARTS, dtype=torch.int32) if packed else None
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts} if packed else {}
    one_rank = functools.partial(in_documents, documents) if documents is not None else on_one_rank
    if offset is not None:
        one_rank = functools.partial(on_one_rank, offset=offset)
    exact = one_rank(tensors, torch.float64, **mask, **lengths)
    yardstick = one_rank(tensors, dtype, **mask, **lengths)

    own = mine(starts)
    q, k, v = (t[own].requires_grad_() for t in tensors[:3])
    shared = ContextGroups.of(exchange or groups(comm_type), comm_type)
    assert shared is not None
    first = None
    if documents is not None:
        first = documents_of(hidden_by(documents)[:, None, own], shared, causal=True)
    learnt = [] if offset is None else [offset.clone().requires_grad_()]
    attention = Attention(WIDTH_QK**-0.5, offset=learnt[0] if learnt else None)
    out = context_attention(
        attention, q, k, v, shared, starts=starts, documents=first, ring=ring, **mask
    )
    grads = torch.autograd.grad(out, (q, k, v, *learnt), tensors[3][own])
    places: list[Any] = [own] * 4
    if learnt:  # that of all ranks' results is their sum, as Megatron adds up every weight's
        dist.all_reduce(grads[3])
        places.append(slice(None))
    for name, got, true, other, at in zip(
        ("out", "dq", "dk", "dv", "doffset"), (out, *grads), exact, yardstick, places, strict=False
    ):
        floor = 1e-6 * true.norm()
        if name == "doffset":  # terms of its sum cancel: what each is rounded by does not
            floor = torch.finfo(dtype).eps * (tensors[3] * exact[0]).sum(-1).norm()
        allowed = 2 * (other[at].double() - true[at]).norm() + floor
        error = (got.double() - true[at]).norm()
        assert error <= allowed, f"{name}: {error:.3e} > {allowed:.3e}"


def mine(starts: Tensor | None, tokens: int = TOKENS) -> Tensor:
    bounds = torch.tensor([0, tokens]) if starts is None else starts
    return owners(bounds, tokens, dist.get_world_size()) == dist.get_rank()


def hidden_by(first: Tensor) -> Tensor:
    """`[B, queries, keys]`: what a token does not see, from its first key `[B, tokens]`."""
    keys = torch.arange(first.shape[1])
    return (keys < first[:, :, None]) | (keys > keys[:, None])


def in_documents(
    first: Tensor, tensors: list[Tensor], dtype: torch.dtype, **mask: Any
) -> list[Tensor]:
    """On one rank: each row of the batch as a pack of its documents."""
    parts = []
    for row, keys in enumerate(first):
        cuts = [*(keys == torch.arange(len(keys))).nonzero().view(-1).tolist(), len(keys)]
        cu = torch.tensor(cuts)
        parts.append(
            on_one_rank(
                [t[:, row] for t in tensors], dtype, cu_seqlens_q=cu, cu_seqlens_k=cu, **mask
            )
        )
    return [torch.stack(rows, 1) for rows in zip(*parts, strict=True)]


COMM_TYPES = [
    pytest.param(name, marks=pytest.mark.distributed(world_size=size), id=f"{name}-{size}")
    for name, size in [
        ("p2p", 2),
        ("all_gather", 2),
        ("a2a", 2),
        ("p2p", 4),
        ("a2a", 4),
        ("a2a+p2p", 4),
    ]
]
CASES = list(product(DTYPES, (1, 2, 4), (False, True)))
MASKS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": (5, 0)},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_like_one_rank(comm_type: str, mask: dict[str, Any]) -> None:
    for dtype, kv_heads, packed in CASES:
        check(comm_type, dtype, kv_heads, mask, packed)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_a_softmax_with_an_offset(comm_type: str, mask: dict[str, Any]) -> None:
    """It enters each row once, whoever computes which part; a rank has no gradient of others' heads."""
    offset = torch.linspace(-1, 2, HEADS)
    for dtype, kv_heads, packed in CASES:
        check(comm_type, dtype, kv_heads, mask, packed, offset=offset)


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_layers_with_an_offset_and_the_largest_logit(comm_type: str, softmax_type: str) -> None:
    """The largest logit of each head is that of all tokens, on every rank."""
    q, k, v, dout = whole(torch.float32, 2, TOKENS, BATCH)
    own = mine(None)

    def attend(rows: Any, **shared: Any) -> list[Tensor]:
        torch.manual_seed(1)
        layer = DotProductAttention(
            *(HEADS, (WIDTH_QK, WIDTH_V), 2),
            softmax_type=softmax_type,
            return_max_logit=True,
            **shared,
        )
        qkv = [t[rows].requires_grad_() for t in (q, k, v)]
        out, largest = layer(*qkv, None)
        by_row = out.transpose(0, 1)
        of_batch, again = layer(*(t.transpose(0, 1) for t in qkv), None, qkv_format="bshd")
        assert torch.equal(of_batch, by_row)
        assert torch.equal(again, largest)
        inputs = [*qkv, *layer.parameters()]
        return [largest, out, *torch.autograd.grad(out, inputs, dout[rows].flatten(-2))]

    largest, *wanted = attend(slice(None))
    found_largest, *found = attend(
        own, cp_group=groups(comm_type), cp_comm_type=comm_type, attn_mask_type="causal"
    )
    torch.testing.assert_close(found_largest, largest)
    if softmax_type == "learnable":
        dist.all_reduce(found[4])
        torch.testing.assert_close(found.pop(), wanted.pop(), rtol=1e-4, atol=1e-5)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected[own], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_the_largest_logit_of_a_pack(comm_type: str, causal: bool) -> None:
    qkv = whole(torch.float32, 2, TOKENS)[:3]
    starts = torch.tensor(STARTS, dtype=torch.int32)
    kind = "padding_causal" if causal else "padding"

    def largest(rows: Any, **shared: Any) -> Tensor:
        layer = DotProductAttention(
            *(HEADS, (WIDTH_QK, WIDTH_V), 2), qkv_format="thd", return_max_logit=True, **shared
        )
        own = [t[rows] for t in qkv]
        found = layer(*own, cu_seqlens_q=starts, cu_seqlens_kv=starts, attn_mask_type=kind)[1]
        assert isinstance(found, Tensor)
        return found

    alone = largest(slice(None))
    shared = largest(mine(starts), cp_group=groups(comm_type), cp_comm_type=comm_type)
    torch.testing.assert_close(shared, alone)


TWO_RINGS = [
    Ring(window=window, keep=keep)
    for window, keep in [(1, "keys"), (1, "keys and values"), (2, "none"), (2, "keys"), (4, "none")]
]


@pytest.mark.distributed(world_size=4)
@pytest.mark.parametrize("ring", TWO_RINGS, ids=str)
def test_inner_rings_and_kept_keys(ring: Ring) -> None:
    for dtype, causal, packed in product(DTYPES, (True, False), (True, False)):
        check("p2p", dtype, 2, {"causal": causal}, packed, ring=ring)


@pytest.mark.distributed(world_size=4)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 3), (6, 2), (6, 1), (5, 1), (9, 3)])
def test_heads_that_the_ranks_do_not_divide(heads: int, kv_heads: int) -> None:
    for dtype, causal, packed in product(DTYPES, (True, False), (True, False)):
        check("a2a", dtype, kv_heads, {"causal": causal}, packed, heads=heads)


@pytest.mark.distributed(world_size=4)
def test_heads_of_neighbours_tokens() -> None:
    """Without the zig-zag."""
    world = dist.group.WORLD
    assert world is not None
    rank = dist.get_rank()
    tensors = [t.double() for t in whole(torch.float64, 3, 4 * 3, BATCH, heads=6)]
    want = on_one_rank(tensors, torch.float64)
    own = slice(3 * rank, 3 * rank + 3)
    q, k, v = (t[own].requires_grad_() for t in tensors[:3])
    shares = HeadShares.of(6, 3, 4)
    of_heads = [
        gather_tokens(t, heads, world)
        for t, heads in ((q, shares.queries), (k, shares.keys), (v, shares.keys))
    ]
    repeated = [shares.repeat(t, rank) for t in of_heads[1:]]
    out, _ = attention_ref(of_heads[0], *repeated, softmax_scale=WIDTH_QK**-0.5)
    out = scatter_tokens(out, shares.queries, world)
    for got, expected in zip(
        (out, *torch.autograd.grad(out, (q, k, v), tensors[3][own])), want, strict=True
    ):
        torch.testing.assert_close(got, expected[own], rtol=1e-10, atol=1e-12)


FIRST_KEYS = torch.tensor([[0] * 5 + [5] * 30 + [35] * 28 + [63], [0] * 64])
"""Documents that begin anywhere, the last a single token; and a row that is one document."""


@pytest.mark.distributed(world_size=4)
@pytest.mark.parametrize("window", [None, (5, 0)])
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_documents_that_begin_anywhere(comm_type: str, window: tuple[int, int] | None) -> None:
    mask = {"causal": True, "window": window}
    for dtype, kv_heads in product(DTYPES, (1, 4)):
        check(comm_type, dtype, kv_heads, mask, False, documents=FIRST_KEYS)


@pytest.mark.distributed(world_size=2)
def test_masks_that_hide_nothing_but_later_tokens_are_the_causal_one() -> None:
    shared = ContextGroups.of(groups("p2p"), "p2p")
    assert shared is not None
    own = mine(None)
    plain = hidden_by(torch.zeros(1, TOKENS, dtype=torch.int64))[:, None, own]
    assert documents_of(plain, shared, causal=True) is None
    assert documents_of(torch.zeros_like(plain), shared, causal=False) is None
    # rank 1 has no row that shows the second document: all ranks know it nevertheless
    first = torch.tensor([[0] * 50 + [50] * 14])
    found = documents_of(hidden_by(first)[:, None, own], shared, causal=True)
    assert found is not None
    assert torch.equal(found, first)
    with torch.inference_mode():
        again = documents_of(hidden_by(first)[:, None, own].clone(), shared, causal=True)
        assert again is not None
        assert torch.equal(again, first)
    plain[..., -1, 3] = True
    for causal in (True, False):
        with pytest.raises(ValueError, match="an attention mask of its own"):
            documents_of(plain, shared, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "comm_type",
    [
        pytest.param(name, marks=pytest.mark.distributed(world_size=size), id=f"{name}-{size}")
        for size in (2, 4)
        for name in ("p2p", "all_gather", "a2a", *(["a2a+p2p"] if size == 4 else []))
    ],
)
def test_dropout_drops_what_one_rank_would(comm_type: str, causal: bool) -> None:
    """v is the identity, so that the result is the probabilities."""
    tokens, seed = 64 * 2 * dist.get_world_size(), torch.tensor(5)
    tensors = [torch.zeros(tokens, 1, HEADS, 8)] * 2
    v = torch.eye(tokens)[:, None, None].repeat(1, 1, HEADS, 1)
    dout = torch.randn(tokens, 1, HEADS, tokens, generator=torch.Generator().manual_seed(1))
    want = on_one_rank([*tensors, v, dout], torch.float32, causal=causal, dropout=0.3, seed=seed)
    own = mine(None, tokens)
    q, k, v = (t[own].requires_grad_() for t in (*tensors, v))
    shared = ContextGroups.of(groups(comm_type), comm_type)
    assert shared is not None
    attention = Attention(8**-0.5, dropout=0.3, seed=seed)
    out = context_attention(attention, q, k, v, shared, causal=causal)
    assert torch.equal(out == 0, want[0][own] == 0)
    grads = torch.autograd.grad(out, (q, k, v), dout[own])
    for got, expected in zip((out, *grads), want, strict=True):
        torch.testing.assert_close(got, expected[own], rtol=1e-4, atol=1e-5)


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
def test_dropout_in_packs(comm_type: str) -> None:
    starts, seed = torch.tensor([0, 256, 768, 1024]), torch.tensor(-7)
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(1024, HEADS, 8, generator=generator) for _ in range(4)]
    how = {"causal": True, "dropout": 0.5, "seed": seed}
    want = on_one_rank(tensors, torch.float32, cu_seqlens_q=starts, cu_seqlens_k=starts, **how)
    own = mine(starts, 1024)
    q, k, v, dout = (t[own].requires_grad_() for t in tensors)
    shared = ContextGroups.of(groups(comm_type), comm_type)
    assert shared is not None
    attention = Attention(8**-0.5, dropout=0.5, seed=seed)
    out = context_attention(attention, q, k, v, shared, causal=True, starts=starts)
    for got, expected in zip((out, *torch.autograd.grad(out, (q, k, v), dout)), want, strict=True):
        torch.testing.assert_close(got, expected[own], rtol=1e-4, atol=1e-5)


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
def test_dropout_in_chunks_of_any_length(
    comm_type: str, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Drops what one rank would if each chunk were padded to a multiple of 64; whole sequences need none."""
    log_once.cache_clear()
    dropout, seed = 0.3, torch.tensor(11)
    bounds = [0, 36, 64, 128] if packed else [0, 36]
    starts, tokens = torch.tensor(bounds), bounds[-1]
    generator = torch.Generator().manual_seed(4)
    batch = [] if packed else [1]
    tensors = [torch.randn(tokens, *batch, HEADS, 8, generator=generator) for _ in range(4)]
    whole_q, whole_k, whole_v = (t.clone().requires_grad_() for t in tensors[:3])
    outs = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        q, k, v = (t[begin:end].view(-1, HEADS, 8) for t in (whole_q, whole_k, whole_v))
        places = torch.arange(end - begin)
        if comm_type != "a2a":
            chunk = (end - begin) // 4
            places = places // chunk * (-(-chunk // 64) * 64) + places % chunk
        sizes = (number, HEADS, int(places[-1]) + 1, end - begin)
        mask = dropout_mask_ref(seed, dropout, *sizes)[:, places]
        scores = torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        p = scores.masked_fill(hidden, float("-inf")).softmax(-1) * mask
        outs.append(torch.einsum("hqk,khd->qhd", p, v))
    want = torch.cat(outs).view_as(whole_q)
    wanted = [want, *torch.autograd.grad(want, (whole_q, whole_k, whole_v), tensors[3])]

    own = mine(starts, tokens)
    q, k, v, dout = (t[own].requires_grad_() for t in tensors)
    shared = ContextGroups.of(groups(comm_type), comm_type)
    assert shared is not None
    attention = Attention(8**-0.5, dropout=dropout, seed=seed)
    out = context_attention(
        attention, q, k, v, shared, causal=True, starts=starts if packed else None
    )
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected[own], rtol=1e-4, atol=1e-5)
    assert ("no multiple of 64" in caplog.text) == (comm_type != "a2a")


@pytest.mark.distributed(world_size=2)
def test_layers_of_both_specs_have_the_ring_of_their_number() -> None:
    undo = RING.set(RingSettings(window=2, keep="keys", interval=1))
    rings = [ring_settings().of_layer(number) for number in (1, 2, 3, None)]
    undo()
    assert [ring.keep for ring in rings] == ["keys", "none", "keys", "keys"]
    assert {ring.window for ring in rings} == {2}
    assert ring_settings().of_layer(1) == Ring()


@pytest.mark.distributed(world_size=2)
def test_a_ring_of_single_messages_is_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Ascend, whose batches have one to and one from a rank."""
    world = dist.group.WORLD
    assert world is not None
    torch.manual_seed(dist.get_rank())
    q, k, v, dout = (torch.randn(8, 1, 2, 4).requires_grad_() for _ in range(4))

    def attended() -> list[Tensor]:
        shared = ContextGroups.of(world, "p2p")
        assert shared is not None
        out = context_attention(Attention(0.5), q, k, v, shared, causal=True)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    expected = attended()
    rounds: list[int] = []
    batch = dist.batch_isend_irecv

    def counted(ops: list[dist.P2POp]) -> list[Any]:
        peers = [(op.op, op.group_peer) for op in ops]
        assert len(set(peers)) == len(peers)
        rounds.append(len(ops))
        return batch(ops)

    monkeypatch.setattr(dist, "batch_isend_irecv", counted)
    monkeypatch.setattr(collectives, "_REPEATS", ())
    assert all(map(torch.equal, attended(), expected))
    assert len(rounds) >= 4


@pytest.mark.distributed(world_size=2)
def test_bad_input_names_sizes_and_a_way_out() -> None:
    world = dist.group.WORLD
    assert world is not None

    def attend(tokens: int = 8, heads: int = 2, **options: Any) -> None:
        x = torch.randn(tokens, 1, heads, 4)
        DotProductAttention(heads, 4, cp_group=world, **options)(x, x, x, None)

    with pytest.raises(
        ValueError, match=r"sequences of \[10\] tokens.*a multiple of 4 \(nearest: \[8\]\)"
    ):
        attend(5)
    with pytest.raises(ValueError, match=r"1 heads on each rank.*--cp-comm-type p2p"):
        attend(8, 1, cp_comm_type="a2a")
    undo = RING.set(RingSettings(window=3))
    with pytest.raises(ValueError, match=r"window of 3 ranks.*ring of 2; use one of 1, 2"):
        attend()
    undo()
    with pytest.raises(ValueError, match=r"cp_comm_type='ring': use one of p2p"):
        attend(cp_comm_type="ring")
    with pytest.raises(ValueError, match="--hierarchical-context-parallel-sizes"):
        attend(cp_comm_type="a2a+p2p")
    with pytest.raises(ValueError, match="window of"):
        attend(attn_mask_type="no_mask", window_size=(2, 2))
    layer = DotProductAttention(2, 4, attn_mask_type="no_mask", cp_group=world)
    x = torch.randn(8, 1, 2, 4)
    with pytest.raises(ValueError, match="8 queries of a rank, 16 keys and 16 values"):
        layer(x, torch.cat([x, x]), torch.cat([x, x]), None)
    layer = DotProductAttention(2, 4, attn_mask_type="arbitrary", cp_group=world)
    with pytest.raises(ValueError, match="a mask or a bias of its own"):
        layer(x, x, x, torch.zeros(1, 1, 8, 8, dtype=torch.bool))


@pytest.mark.distributed(world_size=2)
def test_one_rank_is_no_group() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    assert ContextGroups.of(alone, "p2p") is None
    layer = DotProductAttention(2, 4, cp_group=dist.group.WORLD)
    assert layer.context_groups is not None
    layer.set_context_parallel_group(None, None, None)
    assert layer.context_groups is None


@pytest.mark.distributed(world_size=2)
def test_upstreams_attention_does_not_run_on_its_own_keys_once_the_feature_is_off() -> None:
    class Upstreams(torch.nn.Module):
        @context_parallel.split_over_ranks
        def __init__(self, config: Any, pg_collection: Any = None) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return x

    config = SimpleNamespace(context_parallel_size=2)
    module, x = Upstreams(config, SimpleNamespace(cp=dist.group.WORLD)), torch.ones(1)
    off = context_parallel.switch_on()
    assert module(x) is x
    off()
    with pytest.raises(RuntimeError, match="over 2 ranks, would see the keys of its own"):
        module(x)


def of_local_spec(**attributes: Any) -> SimpleNamespace:
    """What of upstream's `DotProductAttention` is looked at."""
    return SimpleNamespace(
        scale_mask_softmax=SimpleNamespace(window_size=None, scale=None),
        softmax_scale=0.5,
        softmax_offset=None,
        attention_dropout=SimpleNamespace(training=False, p=0.0),
        attn_mask_type=SimpleNamespace(name="causal"),
        layer_number=1,
        config=None,
        **attributes,
    )


@pytest.mark.distributed(world_size=2)
def test_an_attention_bias_is_for_one_rank() -> None:
    shared = ContextGroups.of(dist.group.WORLD, "a2a")
    module = of_local_spec(**{context_parallel._GROUPS: shared})
    x = torch.randn(8, 1, 2, 4)
    forward = context_parallel.attend_over_ranks(lambda *args: x)
    with pytest.raises(ValueError, match=r"an attention bias.*use --context-parallel-size 1"):
        forward(module, x, x, x, None, attention_bias=torch.zeros(1, 2, 8, 8))


@pytest.mark.distributed(world_size=2)
def test_a_batchs_own_group_takes_a_window_that_divides_it() -> None:
    """With `--hybrid-context-parallel` groups have any size."""

    def upstreams(*args: Any) -> Tensor:
        raise AssertionError("of a rank's own keys alone")

    x = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(3)).repeat(8, 1, 1)
    module = of_local_spec()
    starts = torch.tensor([0, 16], dtype=torch.int32)
    packed = SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        cp_group=dist.group.WORLD,
        local_cp_size=2,
    )
    forward = context_parallel.attend_over_ranks(upstreams)
    found = []
    for window in (1, 4):
        off = context_parallel.switch_on(window=window)
        mine = x[:8]
        found.append(forward(module, mine, mine, mine, None, packed_seq_params=packed))
        off()
    assert torch.equal(*found)
