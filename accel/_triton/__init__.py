"""The Triton kernels, one file per op, named like it in `accel/ops` and imported as `accel._triton`.

A file holds, top to bottom: its kernels; the launchers, functions with exactly the arguments of the
op's schema, which choose blocks and warps by a heuristic that is written down; `KERNELS`, which says
for which op each launcher is; and `compile_cases`, calls that `accel.testing.compile_table`
compiles ahead of time for every architecture, on tensors without memory.

Rules that all of them keep: arithmetic and sums in fp32, rounded once on the way out; offsets in
int64 wherever rows are multiplied by a stride; no atomics, and sums in an order that the shape alone
fixes, so that the same input gives the same bits; no autotuning, which would measure during
somebody's training and choose another order the next time. Kernels are launched through
`launch.launch`, never directly.
"""

__all__ = ["MODULES"]

MODULES = (
    "activation",
    "adamw",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "gemm_accumulate",
    "grouped_gemm",
    "layer_norm",
    "masked_softmax",
    "moe_permute",
    "multi_tensor",
    "rms_norm",
    "rope",
    "topk_router",
)
"""The table of contents."""
