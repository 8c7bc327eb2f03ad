"""The outputs of a layer's norms are freed until the backward pass, and computed again there.

``--accel-recompute-norm`` (MindSpeed's ``--recompute-norm``): the outputs of the norms before attention and
before the MLP, ``hidden_size`` elements of a token each, are computed again from the layer's residual
stream, which is kept anyway, just before the first matrix product behind them needs them; of a hybrid
model's Mamba layers that of their one norm, where it is a part of the linear layer behind it.
``--accel-recompute-norm-num-layers N`` does so in the first N layers of each rank, its virtual stages in
turn (MindSpeed's ``--recompute-norm-num-layers``). It is what Megatron's ``--recompute-granularity selective
--recompute-modules layernorm`` does in every layer, and composes with any other recomputation.

Gradients are those of stock, bit for bit, in the local spec and in Transformer Engine's, whose norms are
parts of linear layers. What is freed and what is left alone: ``accel/memory/recompute.py``. Where the library
Transformer Engine is installed it is skipped, in both specs.
"""

from __future__ import annotations

from accel.feature import Feature
from accel.patches._layers import (
    MAMBA_LAYER,
    NUM_LAYERS,
    TRANSFORMER_LAYER,
    FirstLayers,
    when_a_layer_is_built,
)
from accel.patches.recompute_modules import recompute_norms
from accel.upstream import SUPPORTED_RANGE, te_checkpoints

LAYERS = FirstLayers()
choosing = LAYERS.wrapping(recompute_norms)

FEATURE = Feature(
    name="recompute_norm",
    summary="free the outputs of a layer's norms until the backward pass, and compute them again there",
    preset=None,
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    benchmarks=("activation_memory",),
    requires=("recompute_modules",),
    unavailable=te_checkpoints,
    settings=(NUM_LAYERS,),
    switch_on=LAYERS.switch_on,
    patches=when_a_layer_is_built(
        "accel.patches.recompute_norm:choosing", "norms", (TRANSFORMER_LAYER, MAMBA_LAYER)
    ),
)
