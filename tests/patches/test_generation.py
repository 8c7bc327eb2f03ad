"""Text generation on the CPU by Megatron's static engine, whose keys and values are cached: its tokens are
those of whole forward passes, and what preset fast gives is what preset off does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accel
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

WORDS, LENGTH, NEW = 64, 32, 6
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6])


class Tokenizer:
    """Words are numbers."""

    vocab_size, eod, bos = WORDS, WORDS - 1, None

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: Any, **options: Any) -> str:
        return " ".join(str(int(token)) for token in tokens)

    def offsets(self, tokens: Any, text: str) -> list[int]:
        return list(range(len(tokens)))


@contextmanager
def megatron(preset: str, spec: str) -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    accel.enable(preset=preset, te_layers=spec != "local")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        accel.disable()


def built(spec: str, **options: Any) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        gradient_accumulation_fusion=False,
        **options,
    )
    model = GPTModel(
        config,
        getattr(gpt_layer_specs, f"get_gpt_layer_{spec}_spec")(),
        WORDS,
        LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.cuda().eval()


@torch.no_grad()
def by_whole_passes(model: Any, prompt: list[int]) -> tuple[list[int], Tensor]:
    """The tokens, and the log-probabilities of all that could come next."""
    tokens, found = list(prompt), []
    for _ in range(NEW):
        ids = torch.tensor([tokens])
        places = torch.arange(len(tokens))[None]
        hidden = torch.ones(len(tokens), len(tokens)).triu(1).bool()[None, None]
        logits = model(ids, places, hidden)[0, -1].float()
        found.append(logits.log_softmax(-1))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], torch.stack(found)


def by_the_engine(model: Any) -> list[SimpleNamespace]:
    from megatron.core.inference import utils
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines import StaticInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import (
        TextGenerationController,
    )

    context = StaticInferenceContext(max_batch_size=2, max_sequence_length=LENGTH)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), Tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine says that it will be removed
        engine = StaticInferenceEngine(controller, max_batch_size=2, legacy=True)
    wanted = SamplingParams(num_tokens_to_generate=NEW, top_k=1, return_log_probs=True)
    texts = [" ".join(map(str, prompt)) for prompt in PROMPTS]
    try:
        return engine.generate(prompts=texts, sampling_params=wanted)
    finally:
        if (mode := getattr(utils, "InferenceMode", None)) is not None:  # 0.17 has none
            mode.unset_active()


def check(*cases: dict[str, Any]) -> None:
    for spec in ("local", "with_transformer_engine"):
        for options in cases or ({},):
            expected = None
            for preset in ("off", "fast"):
                with megatron(preset, spec):
                    model = built(spec, **options)
                    whole = [by_whole_passes(model, prompt) for prompt in PROMPTS]
                    found = by_the_engine(model)
                case = (spec, options, preset)
                assert [f.generated_tokens.tolist() for f in found] == [t for t, _ in whole], case
                for request, (tokens, logs) in zip(found, whole, strict=True):
                    chosen = logs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                    given = torch.tensor(request.generated_log_probs[-NEW:])
                    torch.testing.assert_close(given, chosen, rtol=1e-5, atol=1e-5)
                logs = torch.stack([logs for _, logs in whole])
                expected = logs if expected is None else expected
                torch.testing.assert_close(logs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_cached_keys_give_the_tokens_of_whole_passes(version: str) -> None:
    run_on(version, check)


def test_cached_keys_of_windows_and_with_norms() -> None:
    check({"window_size": (4, 0), "qk_layernorm": True})
