"""Sequences split over 2 and 4 ranks against one rank with all of them: results and gradients, each way of
sharing, packed or not, and bad input."""

from __future__ import annotations

import itertools
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accel
from accel.layers.attention import DotProductAttention
from accel.ops import attention_ref
from accel.parallel.context import ContextGroups, owners
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


def whole(dtype: torch.dtype, kv_heads: int, *leading: int) -> list[Tensor]:
    """q, k, v and the gradient of the result, the same on each rank."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((HEADS, WIDTH_QK), (kv_heads, WIDTH_QK), (kv_heads, WIDTH_V), (HEADS, WIDTH_V))
    return [torch.randn(*leading, *size, generator=generator).to(dtype) for size in sizes]


def on_one_rank(tensors: list[Tensor], dtype: torch.dtype, **mask: Any) -> list[Tensor]:
    q, k, v = (t.to(dtype).requires_grad_() for t in tensors[:3])
    out, _ = attention_ref(q, k, v, **mask)
    return [out, *torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype))]


def check(comm_type: str, dtype: torch.dtype, kv_heads: int, mask: dict, packed: bool) -> None:
    leading = (TOKENS,) if packed else (TOKENS, BATCH)
    tensors = whole(dtype, kv_heads, *leading)
    starts = torch.tensor(STARTS, dtype=torch.int32)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts} if packed else {}
    exact = on_one_rank(tensors, torch.float64, **mask, **lengths)
    yardstick = on_one_rank(tensors, dtype, **mask, **lengths)

    bounds = starts if packed else torch.tensor([0, TOKENS])
    own = owners(bounds, TOKENS, dist.get_world_size()) == dist.get_rank()
    q, k, v = (t[own].requires_grad_() for t in tensors[:3])
    layer = DotProductAttention(
        HEADS,
        (WIDTH_QK, WIDTH_V),
        kv_heads,
        attn_mask_type="causal" if mask["causal"] else "no_mask",
        window_size=mask.get("window"),
        qkv_format="thd" if packed else "sbhd",
        cp_group=groups(comm_type),
        cp_comm_type=comm_type,
    )
    of_pack = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts} if packed else {}
    out = layer(q, k, v, None, **of_pack)
    grads = torch.autograd.grad(out, (q, k, v), tensors[3][own].flatten(-2))
    results = [out.unflatten(-1, (HEADS, WIDTH_V)), *grads]
    for name, got, true, other in zip(
        ("out", "dq", "dk", "dv"), results, exact, yardstick, strict=True
    ):
        allowed = 2 * (other[own].double() - true[own]).norm() + 1e-6 * true.norm()
        error = (got.double() - true[own]).norm()
        assert error <= allowed, f"{name}: {error:.3e} > {allowed:.3e}"


CASES = list(product(DTYPES, (1, 2, 4), (False, True)))
MASKS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": (5, 0)},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    "comm_type",
    [
        *(
            pytest.param(
                comm_type, marks=pytest.mark.distributed(world_size=2), id=f"{comm_type}-2"
            )
            for comm_type in ("p2p", "all_gather", "a2a")
        ),
        *(
            pytest.param(
                comm_type, marks=pytest.mark.distributed(world_size=4), id=f"{comm_type}-4"
            )
            for comm_type in ("p2p", "a2a", "a2a+p2p")
        ),
    ],
)
def test_like_one_rank(comm_type: str, mask: dict[str, Any]) -> None:
    for dtype, kv_heads, packed in CASES:
        check(comm_type, dtype, kv_heads, mask, packed)


@pytest.mark.distributed(world_size=4)
@pytest.mark.parametrize("causal", [False, True])
def test_no_two_ranks_drop_the_same_keys(causal: bool) -> None:
    """With the same seed everywhere, as Megatron's context-parallel ranks have it, and v the identity, the
    result is the probabilities: which are zero differs between any two ranks."""
    torch.manual_seed(0)
    length, ranks = 256, 4
    q = k = torch.zeros(length // ranks, 1, 1, 8)
    own = owners(torch.tensor([0, length]), length, ranks) == dist.get_rank()
    v = torch.eye(length)[own].reshape(length // ranks, 1, 1, length)
    layer = DotProductAttention(
        1,
        (8, length),
        attention_dropout=0.5,
        attn_mask_type="causal" if causal else "no_mask",
        cp_group=dist.group.WORLD,
    )
    dropped = (layer(q, k, v, None) == 0).view(-1, length)
    theirs = torch.empty(length, length, dtype=torch.uint8)
    dist.all_gather_into_tensor(theirs, dropped.to(torch.uint8).contiguous())
    # the keys that the first chunk of every rank sees
    seen = length // (2 * ranks) if causal else length
    chunks = theirs.view(ranks, -1, length)[:, : length // (2 * ranks), :seen]
    if causal:  # of rank 0 those below the diagonal
        chunks = chunks[1:]
    for first, second in itertools.combinations(chunks, 2):
        assert 0.4 < (first == second).float().mean() < 0.6
        assert 0.4 < first.float().mean() < 0.6


@pytest.mark.distributed(world_size=2)
def test_bad_input_names_sizes_and_a_way_out() -> None:
    world = dist.group.WORLD
    assert world is not None

    def attend(tokens: int = 8, heads: int = 2, **options: Any) -> None:
        x = torch.randn(tokens, 1, heads, 4)
        DotProductAttention(heads, 4, cp_group=world, **options)(x, x, x, None)

    with pytest.raises(ValueError, match=r"sequences of \[10\] tokens.*a multiple of 4"):
        attend(5)
    with pytest.raises(ValueError, match=r"3 heads on each rank.*--cp-comm-type p2p"):
        attend(8, 3, cp_comm_type="a2a")
    with pytest.raises(ValueError, match=r"cp_comm_type='ring': use one of p2p"):
        attend(cp_comm_type="ring")
    with pytest.raises(ValueError, match="--hierarchical-context-parallel-sizes"):
        attend(cp_comm_type="a2a+p2p")
    with pytest.raises(ValueError, match="window of"):
        attend(attn_mask_type="no_mask", window_size=(2, 2))
    layer = DotProductAttention(2, 4, attn_mask_type="arbitrary", cp_group=world)
    x = torch.randn(8, 1, 2, 4)
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
