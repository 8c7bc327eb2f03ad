"""What is kept between calls lives and changes with its tensor."""

import torch

from accel._npu import moe_permute
from accel._npu.kept import KEPT, host_list
from accel.ops import moe_permute as permute
from accel.ops import moe_row_map, moe_unpermute
from tests.npu.harness import npu_kernels
from tests.npu.test_moe_permute import regular_map

__all__ = ["npu_kernels"]


def test_a_change_in_place_is_seen():
    x = torch.tensor([1, 2])
    assert host_list(x) == [1, 2]
    x[0] = 5
    assert host_list(x) == [5, 2]


def test_equal_tensors_are_not_the_same():
    assert host_list(torch.tensor([1])) == [1]
    assert host_list(torch.tensor([2])) == [2]


def test_inference_tensors_keep_nothing():
    with torch.inference_mode():
        x = torch.tensor([1])
        assert host_list(x) == [1]
        x[0] = 2
        assert host_list(x) == [2]


def test_the_backward_knows_what_the_forward_saw(npu_kernels, monkeypatch):
    """Autograd hands on the very tensor: one look at a routing serves all of a layer."""
    looks = []
    monkeypatch.setattr(
        moe_permute,
        "_places",
        lambda row_map, num_tokens: KEPT.get(row_map, find=lambda: looks.append(1), about="test"),
    )
    x = torch.randn(11, 6, requires_grad=True)
    row_map = moe_row_map(regular_map())
    rows, _ = permute(x, row_map)
    moe_unpermute(rows * 2, row_map, 11).sum().backward()
    assert len(looks) == 1
