"""Multi-token prediction that is computed again as a whole: the mask comes through, the gradients stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.feature import Context
from accel.patches import mtp_recompute
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

from .test_fused_adamw import one_rank

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def gradients(**config: Any) -> list[Tensor]:
    """Loss of a GPT with one predicted token more, padded, and the gradients of its parameters."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    given = {
        "num_layers": 1,
        "mtp_num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
    }
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    made = TransformerConfig(**given, **config)
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    mtp = gpt_layer_specs.get_gpt_mtp_block_spec(made, layer, use_transformer_engine=False)
    model = GPTModel(made, layer, 64, 16, mtp_block_spec=mtp).train()
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(2))
    padding = (torch.arange(16) > 12).expand(2, -1)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    positions = torch.arange(16).expand(2, -1)
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    loss = model(ids, positions, mask, labels=ids, padding_mask=padding).mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def check() -> None:
    with one_rank():
        kept, again = gradients(), gradients(**FULL)
    assert len(kept) == len(again) > 30
    assert all(map(torch.equal, kept, again))


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_gradients_are_those_of_kept_activations(version: str) -> None:
    run_on(version, check)


class Layer:
    """Upstream's of 0.18, as far as it matters here."""

    def _proj_and_transformer_layer(self, x: int, padding_mask: Any = None) -> tuple[int, Any]:
        return x, padding_mask

    def _checkpointed_forward(self, x: int) -> tuple[int, Any]:
        return self._proj_and_transformer_layer(x=x)


def test_the_mask_goes_past_a_function_that_does_not_take_it() -> None:
    layer, wrapped = Layer(), mtp_recompute.passing_the_mask(Layer._checkpointed_forward)
    assert wrapped(layer, x=1, padding_mask="mask") == (1, "mask")
    assert wrapped(layer, x=1) == (1, None)
    assert mtp_recompute.passing_the_mask(Layer._proj_and_transformer_layer) is (
        Layer._proj_and_transformer_layer
    )


@pytest.mark.parametrize(
    ("version", "args", "reason"),
    [
        ("0.18.2", None, None),
        ("0.18.2", {"mtp_num_layers": 1, "recompute_granularity": "full"}, None),
        ("0.18.2", {"mtp_num_layers": 1}, "no layer is computed again as a whole"),
        ("0.18.2", {"mtp_num_layers": None}, "there is no multi-token prediction"),
        ("0.17.1", None, "megatron-core 0.17.1 has no padding mask there"),
        ("0.19.2", None, "megatron-core 0.19.2 passes the mask itself"),
    ],
)
def test_where_it_is_idle(version: str, args: dict | None, reason: str | None) -> None:
    given = None if args is None else SimpleNamespace(**args)
    assert mtp_recompute.FEATURE.idle(Context("cpu", version, given)) == reason
