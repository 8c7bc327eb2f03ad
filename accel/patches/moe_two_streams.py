"""Experts whose products run beside the vector work of other experts, in two streams of a GPU or an NPU.

``--accel-moe-overlap`` computes a rank's experts in slices, one after the other: while rows are copied to
where they are multiplied and back, and while activations are computed, the matrix units wait. With this
feature slices take turns in two streams, and so do the shared experts and the first of a rank's own rows, and
the weights' gradients; what is vector work in one then runs beside the products of the next. An NPU has units
of its own for each ("matrix-vector parallel"), a GPU fills what a product's last tiles leave free.

The kernels are the same, each on the same operands, so results are those of ``--accel-moe-overlap`` bit for
bit. The second stream has memory of its own from PyTorch's allocator: some more is reserved.

**Not yet run on a GPU or an NPU**, so by name only. What comes after what, and when memory is used again, was
followed on the CPU in a model of streams and of the allocator (`tests/distributed/test_expert_streams.py`),
which finds it where the waits are left out, or what the allocator is told.
"""

from __future__ import annotations

from accel.feature import Feature
from accel.parallel.experts.expert_overlap import take_two_streams
from accel.patches._settings import one_expert_rank
from accel.upstream import SUPPORTED_RANGE

FEATURE = Feature(
    name="moe_two_streams",
    summary="compute experts in two streams, products beside vector work",
    preset=None,
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    devices=("cuda", "npu"),
    requires=("moe_overlap",),
    idle=one_expert_rank,
    switch_on=take_two_streams,
)
