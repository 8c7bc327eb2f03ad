"""Other libraries' kernels for our ops, one file per library, used op by op where somebody asks by name.

`ACCEL_CUDA_KERNELS=rms_norm=liger` asks (`accel.ops._peers`). A library's file imports it, and is imported
only where it was asked for; its `OPS` says for each file of `accel/ops` which functions serve its ops.

Rules that all of them keep: a function has exactly the arguments of the op's schema and gives what the op
promises, but for bits, which are as its library rounds; it raises `NotTaken`, before anything is written,
for a call that the library does not take or takes otherwise than the op means it, and ours serves that call;
what the forward saves is the op's own, so that either side may compute the other's gradients. Before the
first call a small one is tried and compared with the reference.
"""

__all__ = ["LIBRARIES"]

LIBRARIES = {
    "liger": ("activation", "add_rms_norm", "layer_norm", "rms_norm"),
    "apex": ("layer_norm", "rms_norm"),
}
"""The table of contents: which files of `accel/ops` each serves."""
