"""The derived tolerance accepts twice PyTorch's own error and one rounding, and nothing beyond."""

import pytest
import torch

from accel.testing.tolerance import assert_close_to_baseline, max_error

EXACT = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
PLAIN = torch.tensor([1.0, 2.01, 3.0])  # off by 0.01


def test_accepts_up_to_twice_the_error_of_the_baseline():
    assert_close_to_baseline(torch.tensor([1.0, 2.0, 3.0199]), PLAIN, EXACT)


def test_rejects_more_and_says_where():
    with pytest.raises(
        AssertionError, match=r"^dx: error 3.000e-02 exceeds .* worst at \(2,\): got 3.0"
    ):
        assert_close_to_baseline(torch.tensor([1.0, 2.0, 3.03]), PLAIN, EXACT, name="dx")


def test_floor_is_one_rounding_on_each_side_where_the_baseline_is_exact():
    plain = EXACT.bfloat16()
    spacing_at_3 = 2**-6
    assert_close_to_baseline(torch.tensor([1.0, 2.0, 3.0 + spacing_at_3]).bfloat16(), plain, EXACT)
    with pytest.raises(AssertionError, match="1 rounding"):
        assert_close_to_baseline(
            torch.tensor([1.0, 2.0, 3.0 + 2 * spacing_at_3]).bfloat16(), plain, EXACT
        )


def test_magnitude_and_roundings_widen_the_floor():
    plain, ours = EXACT.float(), EXACT.float() + 3e-6
    with pytest.raises(AssertionError):
        assert_close_to_baseline(ours, plain, EXACT)
    assert_close_to_baseline(ours, plain, EXACT, magnitude=100.0)
    assert_close_to_baseline(ours, plain, EXACT, roundings=16)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rejects_not_finite(bad):
    with pytest.raises(AssertionError, match=r"worst at \(1,\): got (nan|inf)"):
        assert_close_to_baseline(torch.tensor([1.0, bad, 3.0]), PLAIN, EXACT)


@pytest.mark.parametrize(
    ("ours", "message"),
    [(torch.ones(4), "shape is"), (torch.ones(3, dtype=torch.float16), "dtype is torch.float16")],
)
def test_rejects_other_shapes_and_dtypes(ours, message):
    with pytest.raises(AssertionError, match=message):
        assert_close_to_baseline(ours, PLAIN, EXACT)


def test_empty():
    empty = torch.empty(0)
    assert_close_to_baseline(empty, empty, empty.double())
    assert max_error(empty, empty.double()) == 0.0
