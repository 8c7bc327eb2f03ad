"""What Megatron initialises on the host is the same at every layout, on the CPU too.

The embeddings of positions, of token types and of T5's relative positions are made on the host, and so is
every weight with ``--use-cpu-initialization``: each rank draws the whole of it on the host's random stream.
On CUDA nothing else moves that stream. On the CPU device runtime a draw comes from the device's stream, which
Megatron's warm-up has moved by an amount that depends on the layout; here these draws come from the host's
stream (``accel.device.cpu.generators``), and are the values that CUDA starts from. On other devices nothing
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.device.cpu import generators
from accel.feature import Feature
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

_WHY = "On one device the host's and the device's draws would come from the same stream."
_EMBEDDINGS = "megatron.core.models.common.embeddings"
_HERE = "accel.patches.cpu_initialization"

FEATURE = Feature(
    name="cpu_initialization",
    summary="draw what Megatron initialises on the host from the host's random stream on a CPU",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    patches=(
        Patch(
            target="megatron.core.tensor_parallel.layers:_initialize_affine_weight_cpu",
            replacement=f"{_HERE}:on_host_stream",
            how="wrap",
            expects=(
                "weight",
                "output_size",
                "input_size",
                "per_partition_size",
                "partition_dim",
                "init_method",
                "stride",
                "return_master_weight",
                "params_dtype",
                "rank",
                "world_size",
                "skip_set_tensor_parallel_attributes",
            ),
            why=_WHY,
        ),
        Patch(
            target=f"{_EMBEDDINGS}.language_model_embedding:LanguageModelEmbedding.__init__",
            replacement=f"{_HERE}:on_host_stream",
            how="wrap",
            expects=(
                "self",
                "config",
                "vocab_size",
                "max_sequence_length",
                "position_embedding_type",
                "num_tokentypes",
                "scatter_to_sequence_parallel",
                "tp_group",
            ),
            why=_WHY,
        ),
        Patch(
            target=f"{_EMBEDDINGS}.relative_pos_embedding:RelativePositionEmbedding.__init__",
            replacement=f"{_HERE}:on_host_stream",
            how="wrap",
            expects=(
                "self",
                "bidirectional",
                "init_method",
                "num_attention_heads",
                "relative_attention_num_buckets",
                "relative_attention_max_distance",
            ),
            why=_WHY,
        ),
    ),
)


def on_host_stream(initialize: Callable[..., Any]) -> Callable[..., Any]:
    return generators.drawn_on_host(initialize)
