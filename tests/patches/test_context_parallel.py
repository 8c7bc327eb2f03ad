"""Split sequences: what is refused in place of wrong numbers, and what start-up says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import accel
from accel.feature import Context
from accel.parallel.context import ContextGroups, owners
from accel.patches import context_parallel
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

ALONE = ContextGroups(heads=None, keys=None, ring=True)
"""Stands for several ranks where none is asked for anything."""


def attend(
    kind: str,
    mask: Tensor | None = None,
    packed: Any = None,
    groups: ContextGroups | None = ALONE,
    x: Tensor | None = None,
) -> Tensor:
    """The local spec's attention of 8 tokens, built for split sequences; of `x` with itself."""

    def upstreams(*args: Any) -> Tensor:
        raise AssertionError("of a rank's own keys alone")

    module = SimpleNamespace(
        attn_mask_type=SimpleNamespace(name=kind),
        scale_mask_softmax=SimpleNamespace(window_size=None, scale=None),
        softmax_scale=0.5,
        softmax_offset=None,
        attention_dropout=SimpleNamespace(training=False, p=0.0),
        layer_number=1,
        config=None,
    )
    setattr(module, context_parallel._GROUPS, groups)
    if x is None:
        x = torch.randn(*([8] if packed else [8, 1]), 2, 4)
    forward = context_parallel.attend_over_ranks(upstreams)
    return forward(module, x, x, x, mask, packed_seq_params=packed)


def pack_of(*starts: int, **more: Any) -> SimpleNamespace:
    """Megatron's `PackedSeqParams`."""
    ends = torch.tensor(starts, dtype=torch.int32)
    return SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        **more,
    )


@pytest.mark.parametrize("groups", [None, ALONE], ids=["whole sequences", "split ones"])
def test_a_pack_that_its_batch_gives_one_rank_is_attended_there(groups: Any) -> None:
    """0.18 and later make one of each sequence under `--hybrid-context-parallel`."""
    x = torch.randn(16, 2, 4, generator=torch.Generator().manual_seed(3))
    packed = pack_of(0, 5, 16, local_cp_size=1, cp_group=None)
    found = attend("causal", packed=packed, groups=groups, x=x)
    sequences = [y.transpose(0, 1) for y in x.split([5, 11])]  # [heads, tokens, D]
    alone = [
        torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True, scale=0.5)
        for y in sequences
    ]
    expected = torch.cat([y.transpose(0, 1) for y in alone]).flatten(-2)
    torch.testing.assert_close(found, expected)


def test_arbitrary_without_a_mask_is_an_error() -> None:
    nothing_hidden = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    packed = pack_of(0, 8)
    message = "attn_mask_type arbitrary without an attention mask.*: use causal or no_mask"
    for how in ({}, {"packed": packed}, {"packed": packed, "mask": nothing_hidden}):
        with pytest.raises(ValueError, match=message):
            attend("arbitrary", **how)
    assert attend("arbitrary", nothing_hidden).shape == (8, 1, 8)
    with pytest.raises(ValueError, match="an attention mask of its own"):
        attend("arbitrary", nothing_hidden.logical_not().triu(1))


def _as_upstreams(
    self: Any, config: Any, cp_comm_type: str | None = None, pg_collection: Any = None
) -> None:
    assert config.context_parallel_size == 1  # upstream refuses others


def lines(version: str = "0.19.2", **args: Any) -> list[str]:
    """What start-up says."""
    context = Context("cpu", version, SimpleNamespace(**args))
    context_parallel.check(context)
    return context_parallel.check_sizes(context)


def test_documents_of_rows_that_are_split_whole_are_refused() -> None:
    masked = {"dataloader_inter_document_masking": True, "context_parallel_size": 2}
    message = (
        "--dataloader-inter-document-masking with --context-parallel-size 2: .*: use --context-"
    )
    with pytest.raises(ValueError, match=message):
        lines(**masked)
    assert lines(**masked, sft=True) == [], "packed sequences are split each"
    assert lines(dataloader_inter_document_masking=True, context_parallel_size=1) == []


def test_upstream_splits_rows_and_not_their_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.utils import get_batch_on_this_cp_rank

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    starts = torch.tensor([[0, 4, 16]], dtype=torch.int32)
    row = torch.arange(16)
    split = get_batch_on_this_cp_rank(
        {"tokens": row[None], "cu_seqlens": starts},
        is_hybrid_cp=False,
        cp_group=None,
        use_per_sequence_balancing=True,
    )
    assert torch.equal(split["cu_seqlens"], starts)
    held = split["tokens"][0].tolist()
    assert held == [0, 1, 2, 3, 12, 13, 14, 15]
    described = row[owners(starts[0], 16, 2) == 0].tolist()
    assert held != described, "upstream is right: remove the refusal"


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        ({"position_embedding_type": "rope"}, "rope"),
        ({"position_embedding_type": "yarn"}, "yarn"),
        ({"position_embedding_type": "mrope"}, "mrope"),
        (
            {"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": True},
            "rope",
        ),
    ],
)
def test_dynamic_groups_are_refused_where_their_rotation_is_wrong(
    args: dict[str, Any], kind: str
) -> None:
    args = {"hybrid_context_parallel": True, "context_parallel_size": 1, **args}
    message = f"--hybrid-context-parallel with --position-embedding-type {kind}: .*: leave --hybrid"
    for version in SUPPORTED_MEGATRON:
        if version.startswith("0.17."):
            assert lines(version, **args) == []
            continue
        with pytest.raises(ValueError, match=message):
            lines(version, **args)
        for harmless in ({"hybrid_context_parallel": False}, {"position_embedding_type": "none"}):
            rotary = {"use_rotary_position_embeddings": False}
            assert lines(version, **{**args, **harmless, **rotary}) == []


class Rotated(Exception):
    """Carries the group by whose ranks it was to be done."""


def check_rotation() -> None:
    """Of a pack that comes with a group of its own, as a sequence of a dynamic group does from 0.18 on."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import attention

    from .blocks import HIDDEN, block
    from .test_fused_adamw import one_rank

    def rotate(*args: Any, cp_group: Any, **options: Any) -> Tensor:
        raise Rotated(cp_group)

    with one_rank(), pytest.MonkeyPatch.context() as patched:
        layer = block(1).layers[0].self_attention
        patched.setattr(attention, "apply_rotary_pos_emb", rotate)
        starts = torch.tensor([0, 16], dtype=torch.int32)
        dynamic: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            local_cp_size=2,
            cp_group=dynamic,
        )
        angles = torch.zeros(16, 1, 1, 16)
        with pytest.raises(Rotated) as caught:
            layer(torch.randn(8, 1, HIDDEN), None, rotary_pos_emb=angles, packed_seq_params=packed)
    assert caught.value.args[0] is not dynamic, "upstream is right: remove the refusal"


def check_sequences() -> None:
    """No packs, and so rotated by the angles that are cut for the group."""
    from megatron.core.utils import get_batch_on_this_hybrid_cp_rank

    accel.enable(preset="off")
    try:
        _, params = get_batch_on_this_hybrid_cp_rank({"tokens": torch.arange(8)}, local_cp_size=1)
    finally:
        accel.disable()
    assert params.qkv_format == "sbhd"


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_upstream_rotates_sequences_of_dynamic_groups_wrongly_from_0_18_on(version: str) -> None:
    run_on(version, check_sequences if version.startswith("0.17.") else check_rotation)


ALL_SETTINGS = {"window": "2", "keep": "all", "keep_interval": "1"}


def with_settings(settings: dict[str, str], **args: Any) -> list[str]:
    flags = {f"accel_context_parallel_{name}": value for name, value in settings.items()}
    return lines(**{"context_parallel_size": 4, "num_attention_heads": 8, **args}, **flags)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"context_parallel_size": 1}, "--context-parallel-size is 1"),
        ({"cp_comm_type": ["all_gather"]}, "--cp-comm-type all_gather"),
        ({"cp_comm_type": ["a2a", "all_gather"]}, "--cp-comm-type a2a all_gather"),
        (
            {"cp_comm_type": ["a2a+p2p"], "hierarchical_context_parallel_sizes": [4, 1]},
            "--hierarchical-context-parallel-sizes 4 1 leave one rank in it",
        ),
        ({"window_size": (12, 0)}, "--window-size 12,0, for which keys are gathered"),
    ],
)
def test_settings_of_rings_get_a_line_each_where_there_is_none(
    args: dict[str, Any], reason: str
) -> None:
    args = {"tensor_model_parallel_size": 1, **args}
    assert with_settings(ALL_SETTINGS, **args) == [
        f"--accel-context-parallel-{flag} does nothing: there is no ring of accel's ({reason})"
        for flag in ("window 2", "keep all", "keep-interval 1")
    ]
    assert with_settings({}, **args) == []
    usual = {"window": "1", "keep": "none", "keep_interval": "0"}
    assert with_settings(usual, **args) == []
    # of a ring that there is not no window is too wide
    (line,) = with_settings({"window": "3"}, **args)
    assert line.startswith("--accel-context-parallel-window 3 does nothing: ")
    with pytest.raises(ValueError, match="--accel-context-parallel-window: 'two' is no number"):
        with_settings({"window": "two"}, **args)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"cp_comm_type": ["p2p"]},
        {"cp_comm_type": ["a2a", "p2p"]},
        {"cp_comm_type": ["a2a+p2p"], "hierarchical_context_parallel_sizes": [2, 2]},
        {"window_size": (12, 0), "window_attn_skip_freq": 2},
        {"window_size": (-1, 0)},
    ],
)
def test_settings_of_rings_get_no_line_where_there_is_one(args: dict[str, Any]) -> None:
    args = {"tensor_model_parallel_size": 1, **args}
    assert with_settings(ALL_SETTINGS, **args) == []
    with pytest.raises(ValueError, match="a window of 3 ranks does not divide the ring"):
        with_settings({"window": "3"}, **args)
    (line,) = with_settings({"keep_interval": "1"}, **args)
    assert line == (
        "--accel-context-parallel-keep-interval 1 does nothing: nothing is kept without "
        "--accel-context-parallel-keep"
    )
