"""What is kept between calls lives and changes with its tensor."""

import gc
import weakref

import torch

from accel._npu import moe_permute
from accel._npu.kept import host_list, kept
from accel.ops import moe_permute as permute
from accel.ops import moe_row_map, moe_unpermute
from tests.npu.harness import npu_kernels
from tests.npu.test_moe_permute import regular_map

__all__ = ["npu_kernels"]


def test_is_made_once_for_each_name():
    x, made = torch.ones(3), []
    for name in ("a", "a", ("a", 1), "a"):
        kept(x, name, lambda name=name: made.append(name))
    assert made == ["a", ("a", 1)]


def test_a_change_in_place_is_seen():
    x = torch.tensor([1, 2])
    assert host_list(x) == [1, 2]
    x[0] = 5
    assert host_list(x) == [5, 2]


def test_equal_tensors_are_not_the_same():
    assert host_list(torch.tensor([1])) == [1]
    assert host_list(torch.tensor([2])) == [2]


def test_is_gone_with_the_tensor():
    x, result = torch.ones(3), torch.ones(2)
    gone = weakref.ref(result)
    kept(x, "result", [result].pop)
    del result
    assert gone() is not None
    del x
    gc.collect()
    assert gone() is None


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
        lambda row_map, num_tokens: kept(row_map, "test", lambda: looks.append(1)),
    )
    x = torch.randn(11, 6, requires_grad=True)
    row_map = moe_row_map(regular_map())
    rows, _ = permute(x, row_map)
    moe_unpermute(rows * 2, row_map, 11).sum().backward()
    assert len(looks) == 1
