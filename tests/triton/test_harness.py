"""What carries the contracts' tensors to a GPU leaves them as they lie, seen here without one."""

import torch

from tests.triton.harness import _moved


def test_a_tensor_begins_as_far_into_its_memory_there():
    x = torch.arange(13.0).requires_grad_()
    (there,) = _moved([x[3:].view(2, 5)], "cpu")
    assert there.storage_offset() == 3
    assert torch.equal(there, x[3:].view(2, 5))
    there.sum().backward()
    assert x.grad.tolist() == [0.0] * 3 + [1.0] * 10
    for dense in (x, x.detach()[::2], x.detach()[8:8]):
        assert torch.equal(_moved(dense, "cpu"), dense)


def test_a_tensor_without_memory_stays():
    x = torch.empty(2, device="meta")
    assert _moved(x, "cpu") is x


def test_moving_compiles_as_one_graph():
    x = torch.arange(13.0)
    moved = torch.compile(lambda *xs: _moved(xs, "cpu"), fullgraph=True, backend="eager")
    torch.testing.assert_close(moved(x, x[3:]), (x, x[3:]))
