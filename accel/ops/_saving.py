"""What becomes of the tensors that autograd saves."""

import torch

__all__ = ["hooks_take_saved"]


def hooks_take_saved() -> bool:
    """Whether hooks take what is saved now (`torch.autograd.graph.saved_tensors_hooks`), to move it, or to
    compute it again, as `torch.utils.checkpoint` does without reentry: what runs then must save the same
    tensors as now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
