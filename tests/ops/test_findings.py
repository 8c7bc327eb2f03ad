import gc
import weakref

import torch

from accel.ops.findings import Findings


class Counted:
    def __init__(self):
        self.findings, self.looked = Findings(), 0

    def __call__(self, *tensors: torch.Tensor, about=None) -> float:
        def find() -> float:
            self.looked += 1
            return float(sum(t.sum() for t in tensors))

        return self.findings.get(*tensors, find=find, about=about)


def test_tensors_are_read_once_and_again_when_they_are_written_to():
    get, a, b = Counted(), torch.ones(3), torch.ones(2)
    assert get(a, b) == get(a, b) == 5
    assert get.looked == 1
    b.add_(1)
    assert get(a, b) == 7
    a.zero_()
    assert get(a, b) == get(a, b) == 4
    assert get.looked == 3


def test_what_was_found_before_a_write_is_let_go():
    findings, a = Findings(), torch.ones(3)
    gone = weakref.ref(findings.get(a, find=lambda: torch.ones(2), about="before"))
    findings.get(a, find=lambda: None, about="beside")
    assert gone() is not None
    a.add_(1)
    findings.get(a, find=lambda: None, about="after")
    gc.collect()
    assert gone() is None


def test_another_tensor_or_question_is_another_finding():
    get, a, b = Counted(), torch.ones(3), torch.ones(2)
    assert get(a, b) == 5
    assert get(a, b.clone()) == 5
    assert get(a) == 3
    assert get(a, about="again") == 3
    assert get.looked == 4
    assert get.findings.knows(a, about="again")
    assert not get.findings.knows(a, about="other")


def test_an_address_that_is_used_again_is_not_taken_for_the_old_tensor():
    get, a = Counted(), torch.ones(3)
    for value in range(20):  # CPython gives the next one the id of the last
        assert get(a, torch.full((1,), float(value))) == 3 + value


def test_nothing_is_kept_alive_or_of_inference_mode():
    get, a = Counted(), torch.ones(3)
    get(a)
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None
    assert len(get.findings) == 0
    with torch.inference_mode():
        b = torch.ones(3)
    assert get(b) == get(b) == 3
    assert get.looked == 3


def test_what_is_found_in_inference_mode_may_be_trained_with():
    findings, a = Findings(), torch.tensor([1, 0])
    with torch.inference_mode():
        order = findings.get(a, find=lambda: torch.argsort(a))
    assert not order.is_inference()
    assert findings.get(a, find=lambda: None) is order
