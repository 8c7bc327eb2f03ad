"""Split sequences: what is refused in place of wrong numbers, and what start-up says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.parallel.context import ContextGroups
from accel.patches import context_parallel

ALONE = ContextGroups(heads=None, keys=None, ring=True)
"""Stands for several ranks where none is asked for anything."""


def attend(kind: str, mask: Tensor | None = None, packed: Any = None) -> Tensor:
    """The local spec's attention of 8 tokens, built for split sequences."""

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
    setattr(module, context_parallel._GROUPS, ALONE)
    x = torch.randn(*([8] if packed else [8, 1]), 2, 4)
    forward = context_parallel.attend_over_ranks(upstreams)
    return forward(module, x, x, x, mask, packed_seq_params=packed)


def test_arbitrary_without_a_mask_is_an_error() -> None:
    nothing_hidden = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    packed = SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
    )
    message = "attn_mask_type arbitrary without an attention mask.*: use causal or no_mask"
    for how in ({}, {"packed": packed}, {"packed": packed, "mask": nothing_hidden}):
        with pytest.raises(ValueError, match=message):
            attend("arbitrary", **how)
    assert attend("arbitrary", nothing_hidden).shape == (8, 1, 8)
    with pytest.raises(ValueError, match="an attention mask of its own"):
        attend("arbitrary", nothing_hidden.logical_not().triu(1))
