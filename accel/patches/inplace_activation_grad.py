"""The gradient of an MLP's activation overwrites fc1's output, which is no longer needed then.

In backward the activation reads fc1's output, which the forward saved, and writes a gradient of the
same size. With this feature it writes it to the same memory: the peak in each MLP's backward is
lower by one tensor ``[tokens, 2 ffn_hidden_size / tensor parallel size]`` (half of that without a
gate). The numbers do not change by a bit.

A second backward through the same graph (``retain_graph=True``) then raises an error that says so,
and so does every other gradient that needs fc1's output; no layer of Megatron's does. Needs
``fused_activation``; ``--squared-relu`` outside a MoE's experts is not served, because there Megatron
hands the activation to whoever asks.
"""

from __future__ import annotations

from accel.feature import Feature
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE


def inplace_grad() -> bool:
    """Yes."""
    return True


FEATURE = Feature(
    name="inplace_activation_grad",
    summary="let the activation's gradient overwrite fc1's output: a lower peak in backward",
    preset="max",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    requires=("fused_activation",),
    patches=(
        Patch(
            target="accel.patches.fused_activation:inplace_grad",
            replacement="accel.patches.inplace_activation_grad:inplace_grad",
            expects=(),
            why="The saved output of fc1 is dead once its gradient is known; its memory can hold it.",
        ),
    ),
)
