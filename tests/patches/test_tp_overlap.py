"""What `--accel-tp-overlap` takes, and which of Megatron's layers it serves. Trainings:
`tests/distributed/test_tp_overlap.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accel.feature import Context
from accel.parallel import linear_overlap as overlap
from accel.parallel.linear_overlap import Overlap
from accel.parallel.overlapped_linear import Plan
from accel.patches import _linear, tp_comm_overlap, tp_overlap


def context(**args: Any) -> Context:
    return Context("cpu", "0.19.2", SimpleNamespace(**args))


@pytest.mark.parametrize(("given", "chunks"), [("auto", None), ("1", 1), (4, 4)])
def test_numbers_and_auto_are_taken(given: Any, chunks: int | None) -> None:
    assert tp_overlap.parse_chunks(given) == chunks


@pytest.mark.parametrize("given", ["0", "-2", "2.5", "many", ""])
def test_other_numbers_of_pieces_are_an_error_that_names_them(given: str) -> None:
    with pytest.raises(ValueError, match=rf"'{given}' is no number of pieces: give 1"):
        tp_overlap.parse_chunks(given)


def test_an_unknown_form_is_an_error_that_names_it() -> None:
    assert [tp_overlap.parse_form(form) for form in ("ring", "symmetric")] == ["ring", "symmetric"]
    with pytest.raises(ValueError, match="'star': use ring, collective or symmetric"):
        tp_overlap.parse_form("star")


def test_weight_gradients_are_whole_or_in_pieces() -> None:
    assert [tp_overlap.parse_wgrad(how) for how in ("whole", "pieces")] == [False, True]
    with pytest.raises(ValueError, match="'half': use whole or pieces"):
        tp_overlap.parse_wgrad("half")


def test_values_reach_the_layers_and_go_again() -> None:
    off = tp_overlap.switch_on(4, "collective")
    chosen = overlap.current()
    assert chosen is not None
    assert chosen.fixed == Plan(4, "collective")
    assert not chosen.sums_in_pieces
    off()
    off = tp_overlap.switch_on(wgrad=True)
    chosen = overlap.current()
    assert chosen is not None
    assert chosen.sums_in_pieces
    off()
    assert overlap.current() is None
    assert not _linear._WANTED


def test_megatrons_flag_asks_for_auto_unless_ours_was_given() -> None:
    off = tp_comm_overlap.switch_on()
    assert overlap.current() is not None
    assert overlap.current().fixed is None  # type: ignore[union-attr]
    off()
    ours = tp_overlap.switch_on(2)
    both = tp_comm_overlap.switch_on()
    assert overlap.current().fixed == Plan(2)  # type: ignore[union-attr]
    both()
    assert overlap.current() is not None
    ours()
    assert overlap.current() is None


def test_without_the_flag_there_is_nothing_to_do() -> None:
    idle = tp_comm_overlap.FEATURE.idle
    assert idle(context(tp_comm_overlap=False)) == "no --tp-comm-overlap"
    assert idle(context(tp_comm_overlap=True)) is None
    assert "one tensor-parallel rank" in str(
        tp_overlap.FEATURE.idle(context(tensor_model_parallel_size=1))
    )


def test_a_file_of_userbuffers_is_told_to_be_unread() -> None:
    prepare = tp_comm_overlap.FEATURE.prepare
    assert prepare is not None
    (line,) = prepare(context(tp_comm_overlap_cfg="ub.yaml"))
    assert "ub.yaml" in line
    assert "not read" in line
    assert prepare(context(tp_comm_overlap_cfg=None)) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, []),
        ({"use_megatron_fsdp": True}, ["--tp-comm-overlap"]),
        ({"use_megatron_fsdp": True, "transformer_impl": "transformer_engine"}, []),
        ({"tp_comm_overlap_ag": False}, ["--disable-tp-comm-overlap-ag"]),
        (
            {"tp_comm_overlap_rs": False, "tp_comm_overlap_rs_dgrad": True},
            ["--disable-tp-comm-overlap-rs", "--tp-comm-overlap-rs-dgrad"],
        ),
        ({"tp_comm_overlap_ag": False, "transformer_impl": "transformer_engine"}, []),
        (
            {"tp_comm_bulk_wgrad": False, "transformer_impl": "transformer_engine"},
            ["--disable-tp-comm-bulk-wgrad"],
        ),
        ({"tp_comm_bootstrap_backend": "mpi"}, ["--tp-comm-bootstrap-backend"]),
        ({"tp_comm_split_rs": False, "tp_comm_overlap": False}, []),
        (
            {
                "model_parallel": SimpleNamespace(
                    tp_comm_overlap=True, tp_comm_overlap_disable_qkv=True
                )
            },
            ["tp_comm_overlap_disable_qkv"],
        ),
    ],
)
def test_a_setting_without_effect_gets_a_line(given: dict[str, Any], told: list[str]) -> None:
    prepare = tp_comm_overlap.FEATURE.prepare
    assert prepare is not None
    default = {"tp_comm_overlap": True, "transformer_impl": "local", "tp_comm_overlap_ag": True}
    lines = prepare(context(**{**default, **given}))
    assert [line.partition(" does nothing")[0] for line in lines] == told


def test_defaults_are_megatrons() -> None:
    """Of the settings that get a line where they have another value."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    settings = {
        **tp_comm_overlap._PARTS,
        **tp_comm_overlap._BULK,
        **tp_comm_overlap._USERBUFFERS,
    }
    config = ModelParallelConfig()
    found = {name: value for name, value in vars(config).items() if name.startswith("tp_comm_")}
    del found["tp_comm_overlap"]
    assert {name: default for name, (default, _) in settings.items()} == found


def test_deferred_gradients_are_taken_while_there_is_room() -> None:
    for limit, room in ((0, 3), (2, 2), (None, 3)):
        buffer: list[Any] = []
        take = _linear._taken(buffer, limit)
        assert take is not None
        assert [take(i) for i in range(3)] == [i < room for i in range(3)]  # type: ignore[arg-type]
        assert buffer == list(range(room))
    assert _linear._taken(None, 0) is None


@pytest.mark.parametrize(
    ("how", "stays"),
    [
        ({}, False),
        ({"explicit_expert_comm": True}, True),
        ({"input_is_parallel": False}, True),
        ({"gtp_remat_size": 2}, True),
        ({"tp_group": SimpleNamespace(size=lambda: 1)}, True),
    ],
    ids=["plain", "experts", "whole_input", "sharded_weight", "one_rank"],
)
def test_which_row_layers_are_served(
    how: dict[str, Any], stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    layer = SimpleNamespace(
        **{
            "tp_group": SimpleNamespace(size=lambda: 2),
            "explicit_expert_comm": False,
            "input_is_parallel": True,
            "config": SimpleNamespace(_cpu_offloading_context=None),
            "weight": torch.ones(2, 2),
            **how,
        }
    )
    assert _linear._row_stays(layer) is stays
    calls = []
    forward = _linear.reducing_pieces(lambda self, x: calls.append(x))
    forward(layer, None)
    assert calls == [None], "while nothing overlaps upstream's own code runs"
    if stays:
        said: list[str] = []
        monkeypatch.setattr(_linear, "log_once", lambda feature, line: said.append(line))
        off = overlap.switch_on(Overlap(2))
        forward(layer, 1)
        off()
        assert calls == [None, 1]
        assert len(said) == ("gtp_remat_size" in how)
