"""An fp32 number as a bfloat16 and 16 bits more.

    weight     x rounded to bfloat16, to nearest, ties to even
    remainder  bits(x) - 2^16 bits(weight), a signed 16-bit number: how far rounding went
    x          the number with the bits 2^16 bits(weight) + remainder

Ties       The distance is -2^15 .. 2^15, one more than 16 bits can tell. The last is that of a tie which is
           rounded towards zero, to an even bfloat16: x moves one ulp towards zero first, once. The weight is
           the same, and no other number changes. Of random numbers 1 in 2^17 is such a tie.
Zero       No number rounds to a zero that is further from zero: a remainder below 0 beside a zero is what is
           left where somebody else has set the weight to zero. It counts as 0; as it is, the sum would be the
           bits of a NaN.
NaN        stays a NaN, with a NaN for its weight; its payload may change. Infinity is a number as any other.
Memory     4 bytes for a master weight and its model weight, which take 6 apart.

`accel.ops.adamw` steps on such pairs; here they are made and read.
"""

import torch
from torch import Tensor

__all__ = ["join_remainder", "split_remainder"]

_LARGEST = 2**15 - 1


def split_remainder(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x`, fp32 of any shape -> weight, bfloat16, and remainder, int16, of its shape.

    Raises:
        ValueError: `x` is not fp32.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"split_remainder: x must be torch.float32, got {x.dtype}")
    weight = x.detach().to(torch.bfloat16)
    distance = x.detach().contiguous().view(torch.int32) - _bits(weight)
    return weight, distance.clamp_(max=_LARGEST).to(torch.int16)


def join_remainder(weight: Tensor, remainder: Tensor) -> Tensor:
    """What `split_remainder` was given, but for ties: fp32, of the shape of both.

    Raises:
        ValueError: `weight` is not bfloat16, `remainder` not int16, or their shapes differ.
    """
    if weight.dtype != torch.bfloat16 or remainder.dtype != torch.int16:
        raise ValueError(
            "join_remainder: weight must be torch.bfloat16 and remainder torch.int16, got "
            f"{weight.dtype} and {remainder.dtype}"
        )
    if weight.shape != remainder.shape:
        raise ValueError(
            f"join_remainder: remainder must have the shape of weight {list(weight.shape)}, got "
            f"{list(remainder.shape)}"
        )
    weight = weight.detach()
    distance = torch.where(weight == 0, remainder.clamp(min=0), remainder)
    return (_bits(weight) + distance).view(torch.float32)


def _bits(weight: Tensor) -> Tensor:
    """Of the same number in fp32."""
    return weight.contiguous().view(torch.int16).to(torch.int32) << 16
