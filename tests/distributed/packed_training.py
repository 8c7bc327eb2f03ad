"""A GPT in the local spec on one rank and with its sequences split over two: a program for two ranks of any
supported Megatron: `python -m tests.distributed.packed_training WHAT WAY...`, WHAT a function at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accel

STARTS = [0, 16, 24, 64]
"""Each sequence a multiple of 2 x 2 tokens."""
TOKENS = STARTS[-1]
STEPS, RATE = 4, 0.5
RELATIVE_TOLERANCE = 1e-5
"""As in `test_layouts`."""


def losses(give: Callable[[], tuple[dict[str, Any], Any, Any]], **config: Any) -> list[float]:
    """Of a few steps.

    Args:
        give: gives this rank's part of a batch, its `packed_seq_params` and the group that holds the whole.
        config: of the model; of the ranks too, `context_parallel_size`.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    ranks = config.get("context_parallel_size", 1)
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    made = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **config,
    )
    spec = get_gpt_layer_local_spec()
    model = GPTModel(made, spec, 64, TOKENS, position_embedding_type="rope").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found = []
    for _ in range(STEPS):
        batch, packed, group = give()
        given = (batch["tokens"], batch["position_ids"], None)
        each = model(*given, labels=batch["labels"], packed_seq_params=packed)
        loss = (each * batch["loss_mask"]).sum()
        loss.backward()
        total = torch.stack([loss.detach(), batch["loss_mask"].sum()])
        for tensor in (total, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor, group=group)
        for weight in model.parameters():
            weight.grad /= total[1]
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(total[0] / total[1]))
    parallel_state.destroy_model_parallel()
    assert found[-1] < 0.95 * found[0], f"does not learn: {found}"
    return found


def whole(positions: torch.Tensor) -> dict[str, Any]:
    text = torch.randint(64, (1, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": (torch.arange(TOKENS)[None] % 5 > 0).float(),
        "position_ids": positions[None],
    }


def part_of_a_pack() -> tuple[dict[str, Any], Any, Any]:
    """As `pretrain_gpt.py` of the Megatron at hand asks for it."""
    from megatron.core import parallel_state, utils
    from megatron.core.packed_seq_params import PackedSeqParams

    group = parallel_state.get_context_parallel_group()
    starts = torch.tensor(STARTS, dtype=torch.int32)
    longest = int(starts.diff().max())
    batch = whole(torch.cat([torch.arange(n) for n in starts.diff().tolist()]))
    split = getattr(utils, "get_thd_batch_on_this_cp_rank", None)
    if split is not None:  # 0.17
        return *split(batch, starts, None, torch.tensor([longest])), group
    batch |= {"cu_seqlens": starts[None], "cu_seqlens_padded": None}
    batch = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), starts)
    given |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest)
    return batch, PackedSeqParams(qkv_format="thd", **given), group


def part_of_a_sequence(ranks: int) -> tuple[dict[str, Any], Any, Any]:
    """As 0.17's `--hybrid-context-parallel` has it: a group for each batch, of a model whose ranks hold whole
    sequences otherwise; without a group where that is one rank."""
    from megatron.core import parallel_state, utils
    from megatron.core.packed_seq_params import PackedSeqParams

    group = parallel_state.get_data_parallel_group() if ranks > 1 else None
    ends = torch.tensor([0, TOKENS])
    names = [f"cu_seqlens_{of}{padded}" for of in ("q", "kv") for padded in ("", "_padded")]
    given = dict.fromkeys(names, ends) | dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), TOKENS)
    packed = PackedSeqParams(qkv_format="sbhd", local_cp_size=ranks, cp_group=group, **given)
    batch = whole(torch.arange(TOKENS))
    if group is not None:
        new = {} if hasattr(utils, "get_batch_on_this_hybrid_cp_rank") else {"is_hybrid_cp": False}
        batch = utils.get_batch_on_this_cp_rank(batch, cp_group=group, **new)
    return batch, packed, group or parallel_state.get_context_parallel_group()


def packs(ways: list[str]) -> None:
    """Fails where a way has other losses than one rank, or upstream needs no help."""
    expected = losses(part_of_a_pack)
    for way in ways:
        found = losses(part_of_a_pack, context_parallel_size=2, cp_comm_type=way)
        assert found == pytest.approx(expected, rel=RELATIVE_TOLERANCE), way
    accel.enable(device="cpu", te_layers=False, packs_over_ranks=False)
    with pytest.raises((AssertionError, AttributeError), match=r"Transformer Engine|thd_get_part"):
        losses(part_of_a_pack, context_parallel_size=2)


def groups(ways: list[str]) -> None:
    def alone() -> tuple[dict[str, Any], Any, Any]:
        batch, _, group = part_of_a_sequence(1)
        return batch, None, group

    expected = losses(alone)
    assert losses(lambda: part_of_a_sequence(1)) == expected
    for way in ways:
        found = losses(lambda: part_of_a_sequence(2), cp_comm_type=way)
        assert found == pytest.approx(expected, rel=RELATIVE_TOLERANCE), way


if __name__ == "__main__":
    accel.enable(device="cpu", te_layers=False)  # as with --transformer-impl local
    dist.init_process_group("gloo")
    {"packs": packs, "groups": groups}[sys.argv[1]](sys.argv[2:])
    dist.destroy_process_group()
