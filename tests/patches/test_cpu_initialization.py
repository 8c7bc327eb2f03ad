"""What is initialised on the host does not depend on how far the device's random stream is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

from .test_fused_adamw import one_rank

VOCABULARY, POSITIONS, HIDDEN = 16, 12, 8


def embeddings(device_draws: int, **options: bool) -> dict[str, Tensor]:
    """Of words, positions and token types, and of T5's relative positions."""
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.models.common.embeddings.relative_pos_embedding import (
        RelativePositionEmbedding,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    torch.rand(device_draws, device="cuda")
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, **options)
    module = LanguageModelEmbedding(config, VOCABULARY, POSITIONS, num_tokentypes=2)
    relative = RelativePositionEmbedding(True, torch.nn.init.normal_, 2)
    return {**module.state_dict(), "relative": relative.relative_attention_bias.weight.detach()}


def drawn_on_cuda_hosts() -> dict[str, Tensor]:
    """The host's draws in turn: torch's own for an embedding, then Megatron's."""
    stream = torch.Generator().manual_seed(1)

    def draw(rows: int, columns: int, std: float) -> Tensor:
        torch.randn(rows, columns, generator=stream)
        return torch.empty(rows, columns).normal_(0.0, std, generator=stream)

    return {
        "position_embeddings.weight": draw(POSITIONS, HIDDEN, 0.02),
        "tokentype_embeddings.weight": draw(2, HIDDEN, 0.02),
        "relative": draw(32, 2, 1.0),
    }


def check() -> None:
    for on_host in (False, True):
        with one_rank():
            near, far = (embeddings(draws, use_cpu_initialization=on_host) for draws in (0, 1000))
        assert near.keys() == far.keys()
        for name, weight in near.items():
            assert torch.equal(weight, far[name]), name
        if not on_host:  # words are the device's
            for name, weight in drawn_on_cuda_hosts().items():
                torch.testing.assert_close(near[name], weight, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_the_device_s_stream_does_not_matter(version: str) -> None:
    run_on(version, check)
