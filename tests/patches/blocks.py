"""Transformer blocks of one rank, and what a forward and a backward pass through one give."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from torch import Tensor

from accel.device.cpu import memory

__all__ = ["HIDDEN", "TOKENS", "at_once", "block", "gradients"]

TOKENS, HIDDEN = 128, 64


@functools.cache
def _imported() -> None:
    """What is imported by now is looked at by no later collection of garbage, of which there are many."""
    gc.collect()
    gc.freeze()


def block(layers: int = 4, spec: dict[str, Any] | None = None, **config: Any) -> Any:
    """A `TransformerBlock`: a Llama's of the local spec unless told otherwise."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.transformer_block import TransformerBlock

    _imported()
    destroy_moe_metrics_tracker()  # that of an earlier model, which may have had fewer layers
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    llama = {
        "num_attention_heads": 4,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "gradient_accumulation_fusion": False,
    }
    given = {"num_layers": layers, "hidden_size": HIDDEN, **llama, **config}
    if config.get("multi_latent_attention"):  # of which upstream's local attention knows nothing
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**(spec or {}))
        return TransformerBlock(MLATransformerConfig(**given), layer)
    normalization = given["normalization"]
    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization=normalization, **(spec or {}))
    return TransformerBlock(TransformerConfig(**given), layer)


def gradients(module: Any, seed: int = 2, buffers: bool = False) -> tuple[list[Tensor], int]:
    """Output, gradients of input and parameters, and the bytes that are held between forward and backward.

    With `buffers` the parameters' gradients keep their memory, as those in Megatron's buffers do, and are
    those that are returned.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, 1, HIDDEN, generator=draw).requires_grad_()
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    module.zero_grad(set_to_none=not buffers)
    gc.collect()  # of earlier tests, which else goes in between
    before = memory.memory_allocated()
    output = module(x, mask)
    held = memory.memory_allocated() - before
    output.square().sum().backward()
    assert x.grad is not None
    found = [p.grad for p in module.parameters() if p.grad is not None]
    if not buffers:
        module.zero_grad()
    return [output.detach(), x.grad, *found], held


def at_once(module: Any) -> list[Tensor]:
    """Gradients of the inputs of two micro-batches whose forward passes come first; between them evaluation,
    and a third whose graph is lost."""
    draw = torch.Generator().manual_seed(3)
    inputs = [torch.randn(TOKENS, 1, HIDDEN, generator=draw) for _ in range(3)]
    outputs = []
    for x in inputs:
        x.requires_grad_()
        outputs.append(module(x, None))
        with torch.no_grad():
            module(inputs[0], None)
    del outputs[1]
    for output in outputs:
        output.square().sum().backward()
    gc.collect()
    return [x.grad for x in inputs if x.grad is not None]
