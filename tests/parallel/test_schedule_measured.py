"""What is said of a schedule once its times are known."""

from __future__ import annotations

from accel.parallel.schedule import Times, interleaved, one_f_one_b, zb_h1
from accel.parallel.schedule.measured import Found

MIB = 1 << 20


def found(ranks: int, **times: float) -> Found:
    shown = {"forward": 0.01, "backward": 0.02, "weight": 0.01, **times}
    return Found(Times(**shown), ((MIB, MIB),) * ranks, step=0.5)


def test_a_gain_stands_beside_its_memory() -> None:
    first, second = found(4).compare("zb-h1", zb_h1(4, 8), one_f_one_b(4, 8))
    assert first.startswith("zb-h1: 500 ms a step were measured, 270 ms are predicted")
    assert second.startswith("18.2% less than Megatron's own order (330 ms) is predicted")
    assert second.endswith("rank 3 holds 4 chunks at most, Megatron's order 1: +3.0 MiB")


def test_no_gain_is_said() -> None:
    ours, stock = interleaved(4, 2, 8, extra_warmup=1), interleaved(4, 2, 8)
    _, second = found(4).compare("interleaved", ours, stock)
    assert second.startswith("no gain is predicted over Megatron's own order (570 ms)")
    assert second.endswith("+1.0 MiB")


def test_without_megatrons_order_there_is_one_line() -> None:
    assert len(found(4).compare("zb-h1", zb_h1(4, 8), None)) == 1


def test_what_would_be_quicker_is_named() -> None:
    slow = found(4, bytes=0.01, bandwidth=1.0)
    stock = interleaved(4, 2, 16)
    groups = {f"--groups {g}": interleaved(4, 2, 16, g) for g in (6, 8)}
    *_, advice = slow.compare("interleaved", stock, stock, groups)
    assert advice == "--groups 8: 1110 ms are predicted, with +4 chunks in flight"
    assert len(found(4).compare("interleaved", stock, stock, groups)) == 2
