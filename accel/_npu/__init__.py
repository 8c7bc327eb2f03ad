"""The Ascend kernels, one file per op, named like it in `accel/ops` and imported as `accel._npu`.

A file holds functions with exactly the arguments of the op's schema and `KERNELS`, which says for
which op each is. They call torch-npu's ops through `torch.ops.npu.<name>`, where one serves; the
rest is plain PyTorch, which runs on any device. torch-npu is never imported here: whoever has a
tensor on an NPU has imported it.

Rules that all of them keep: nothing that the documentation of torch-npu does not name is handed to
its ops, in dtypes, layouts, sizes and masks (docs/ascend.md says what was read where); whatever
they do not take is computed by plain PyTorch, never refused; the host reads of
a tensor what an op of torch-npu wants as a list, whether a row map is regular and whether a target is in
range, and that once for as long as the tensor lives (`kept`).
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
