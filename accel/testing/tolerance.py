"""How close is close enough: no number that somebody picked, but what PyTorch itself achieves.

    max |ours - exact|  <=  2 max(max |torch - exact|, roundings * u * magnitude)

`exact` is the fp64 result for the same inputs. `torch` is PyTorch's own, computed in the dtype of
ours. The second term is the least that any implementation can promise: u is half the spacing of
numbers at 1 in the dtype of the result, so `u * magnitude` is one rounding. It matters where
PyTorch was lucky and came out exact.
"""

import torch
from torch import Tensor

__all__ = ["assert_close_to_baseline", "max_error"]

ALLOWED_RATIO = 2.0


def max_error(result: Tensor, exact: Tensor) -> float:
    """`max |result - exact|` in fp64; 0 for empty tensors, NaN if any of `result` is NaN."""
    if exact.numel() == 0:
        return 0.0
    return (result.detach().double() - exact.detach().double()).abs().max().item()


def assert_close_to_baseline(
    ours: Tensor,
    baseline: Tensor,
    exact: Tensor,
    *,
    name: str = "result",
    magnitude: float | None = None,
    roundings: int = 1,
) -> None:
    """Assert that `ours` is at most twice as far from `exact` as `baseline` is.

    Args:
        ours: any shape and floating dtype.
        baseline: the same computed by plain PyTorch; same shape and dtype as ours.
        exact: the same in `torch.float64`, from the same inputs.
        name: what to call it in the message.
        magnitude: the size of the terms that the result sums up, where they cancel;
            `max |exact|` if None.
        roundings: how many in a row the formula needs when it computes in the dtype of the result.

    Raises:
        AssertionError: shapes or dtypes differ, or `ours` is too far off; by how much and where.
    """
    for what in ("shape", "dtype"):
        got, want = getattr(ours, what), getattr(baseline, what)
        assert got == want, f"{name}: {what} is {got}, the baseline has {want}"
    assert exact.shape == ours.shape, f"{name}: shape is {ours.shape}, exact has {exact.shape}"
    assert exact.dtype == torch.float64, f"{name}: exact must be torch.float64, got {exact.dtype}"
    if exact.numel() == 0:
        return
    if magnitude is None:
        magnitude = exact.detach().abs().max().item()
    unit_roundoff = torch.finfo(ours.dtype).eps / 2
    floor = roundings * unit_roundoff * magnitude
    baseline_error = max_error(baseline, exact)
    bound = ALLOWED_RATIO * max(baseline_error, floor)
    error = max_error(ours, exact)
    if error <= bound:  # false for NaN
        return
    difference = (ours.detach().double() - exact.detach()).abs()
    worst = int(difference.nan_to_num(nan=torch.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ours.shape))
    raise AssertionError(
        f"{name}: error {error:.3e} exceeds {bound:.3e} = {ALLOWED_RATIO:g} x max(PyTorch's own "
        f"{baseline_error:.3e}, {roundings} rounding(s) {floor:.3e}); worst at {index}: "
        f"got {ours[index].item():.9g}, exact {exact[index].item():.9g}"
    )
