"""`--accel-moe-load-report`: counts are those of the routing maps, once for each forward pass of training.

Over several ranks: tests/distributed/test_moe_load_report.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import accel
from accel import patching
from accel.feature import Context
from accel.log import log_once
from accel.parallel.experts import load
from accel.parallel.experts.load import Copies, LayerLoad, Recorder, loads, scalars, table
from accel.patches import moe_load_report
from accel.patches._expert_counts import layer_of
from accel.patches.moe_load_report import FEATURE, ON

from .moe_layer import CONFIGS, EXPERTS, HIDDEN, TOKENS, build, one_rank, step

TWO_EXPERTS = LayerLoad(1, (3, 1), (3, 1))


@contextmanager
def reporting(preset: str = "off", every: int = 1, **features: Any) -> Iterator[Recorder]:
    with one_rank(preset, moe_load_report=every, **features):
        yield ON.value.recorder


def counted(recorder: Recorder) -> LayerLoad:
    (found,) = loads(recorder.packed(1, EXPERTS, 1), EXPERTS)
    return found


def dispatched(layer: Any) -> list[torch.Tensor]:
    """The maps that the layer's dispatcher is given from now on."""
    maps, preprocess = [], layer.token_dispatcher.dispatch_preprocess

    def observed(hidden_states: Any, routing_map: torch.Tensor, probs: Any) -> Any:
        maps.append(routing_map.clone())
        return preprocess(hidden_states, routing_map, probs)

    layer.token_dispatcher.dispatch_preprocess = observed
    return maps


def rows_of(*maps: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.cat(maps).sum(0).tolist())


def tokens(seed: int) -> torch.Tensor:
    x = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()


# --- counts


@pytest.mark.parametrize("preset", ["off", "fast"])
@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_those_of_the_maps_that_dispatchers_get(name: str, preset: str) -> None:
    """Over two micro-batches, under all kinds of routers; features of a preset replace parts of them."""
    with reporting(preset) as recorder:
        layer = build(**CONFIGS[name])
        maps = dispatched(layer)
        for seed in (1, 2):
            layer(tokens(seed))[0].sum().backward()
        assert counted(recorder).rows == rows_of(*maps)


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_dropped_rows_are_those_that_no_capacity_would_keep(
    factor: float, pads: bool, policy: str
) -> None:
    with reporting() as recorder:
        free, limited = (
            build(**options)
            for options in (
                {},
                {
                    "moe_expert_capacity_factor": factor,
                    "moe_pad_expert_input_to_capacity": pads,
                    "moe_token_drop_policy": policy,
                },
            )
        )
        wanted, got = dispatched(free), dispatched(limited)
        free(tokens(1))
        assert counted(recorder).dropped == 0
        recorder.clear()
        limited(tokens(1))
        found = counted(recorder)
    assert found.dropped == int((wanted[0] & ~got[0]).sum())
    assert (found.dropped > 0) == (factor < 4)
    assert found.rows == rows_of(got[0])


def test_evaluation_does_not_count() -> None:
    with reporting() as recorder:
        layer = build()
        with torch.no_grad():
            layer.eval()(tokens(1))
        assert not loads(recorder.packed(1, EXPERTS, 1), EXPERTS)
        layer.train()(tokens(1))
        assert sum(counted(recorder).rows) == 2 * TOKENS


def test_outside_megatrons_training_loop_it_says_that_nobody_asks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import global_vars

    with reporting(), caplog.at_level("WARNING", logger="accel"):
        layer = build()
        log_once.cache_clear()
        with monkeypatch.context() as inside:
            inside.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace())
            layer(tokens(1))
        assert not caplog.records
        for seed in (1, 2):
            layer(tokens(seed))
    (record,) = caplog.records
    assert "outside Megatron's own training loop" in record.getMessage()


def megatrons_checkpoint(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """That of --recompute-granularity full."""
    from megatron.core import tensor_parallel

    return tensor_parallel.checkpoint(lambda x: layer(x)[0], False, x)


def without_reentry(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Grad is enabled in both passes."""
    return checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)


def with_reentry(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: layer(x)[0], x, use_reentrant=True)


def nested(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: without_reentry(layer, x), x, use_reentrant=False)


@pytest.mark.parametrize(
    "forward",
    [megatrons_checkpoint, without_reentry, with_reentry, nested],
    ids=lambda f: f.__name__,
)
def test_recomputation_counts_once(forward: Any) -> None:
    with reporting() as recorder:
        layer = build()
        maps = dispatched(layer)
        for seed in (1, 2):
            forward(layer, tokens(seed)).sum().backward()
        assert len(maps) >= 4, "it does run again"
        assert counted(recorder).rows == rows_of(maps[0], maps[len(maps) // 2])


def test_recomputed_moe_modules_count_once() -> None:
    """--recompute-granularity selective --recompute-modules moe"""
    with reporting() as recorder:
        options = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
        layer = build(**options, moe_expert_capacity_factor=0.75)
        maps = dispatched(layer)
        step(layer)
        assert len(maps) == 2
        found = counted(recorder)
        assert found.rows == rows_of(maps[0])
        assert found.dropped == 2 * TOKENS - sum(found.rows)


def test_numbers_are_those_without_the_report() -> None:
    for name in ("capacity", "sigmoid_groups_and_bias"):
        with one_rank("exact"):
            stock = step(build(**CONFIGS[name]))
        with reporting("exact"):
            ours = step(build(**CONFIGS[name]))
        assert all(torch.equal(ours[n], t) for n, t in stock.items())


def test_layers_of_multi_token_prediction_come_behind_all_others() -> None:
    router = SimpleNamespace(
        layer_number=2, is_mtp_layer=False, config=SimpleNamespace(num_layers=8)
    )
    assert layer_of(router) == 2
    router.is_mtp_layer = True
    assert layer_of(router) == 10


def test_passes_that_run_again_count_once() -> None:
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    machine = RerunStateMachine(mode=RerunMode.DISABLED)
    with reporting() as recorder:
        layer = build()
        layer(tokens(1))  # before the first iteration
        runs = 0
        while machine.should_run_forward_backward(None):
            layer(tokens(1))
            runs += 1
        assert runs == 1
        assert sum(counted(recorder).rows) == 2 * TOKENS


# --- off


def test_nothing_is_wrapped_without_the_flag() -> None:
    targets = [p.target for p in FEATURE.patches]
    stock = {t: patching.resolve(t)[2] for t in targets}
    try:
        patched = {p["target"] for p in accel.enable(preset="max")["patches"]}
        assert not patched & set(targets)
        assert accel.enable(preset="off", moe_load_report=1)["features"]["moe_load_report"] == {
            "asked": "flag",
            "state": "active",
            "reason": "",
        }
        assert [ON.value.recorder] == load.ON
        accel.enable(preset="max")
        assert not ON
        assert not load.ON
    finally:
        accel.disable()
    assert all(patching.resolve(t)[2] is stock[t] for t in targets)


@pytest.mark.parametrize("value", [0, -3, "0", "-3", "often", "1.5", "", "1e3"])
def test_what_is_no_number_of_iterations_is_one_error(value: Any) -> None:
    with pytest.raises(ValueError) as error:
        accel.enable(preset="off", moe_load_report=value)
    assert str(error.value) == (
        f"--accel-moe-load-report: {value!r} is no number of iterations: give 1 or more"
    )
    assert accel.status()["device"] is None


def test_the_flag_needs_a_value() -> None:
    with pytest.raises(ValueError, match="--accel-moe-load-report needs a value: N"):
        accel.enable(preset="off", moe_load_report=True)


def context(**args: Any) -> Context:
    shown = {"num_experts": 8, "tensorboard_dir": None, "save": None, "cuda_graph_impl": "none"}
    return Context(
        "cpu", "0.19.2", SimpleNamespace(**{**shown, "accel_moe_load_report": "10", **args})
    )


@pytest.mark.parametrize(
    ("args", "notes"),
    [
        (
            {},
            [
                "--accel-moe-load-report 10: no pictures, as neither --tensorboard-dir nor --save is given"
            ],
        ),
        ({"save": "run"}, ["--accel-moe-load-report 10: pictures in run/moe_load"]),
        (
            {"save": "run", "tensorboard_dir": "board"},
            ["--accel-moe-load-report 10: pictures in board/moe_load"],
        ),
        ({"accel_moe_load_report": None}, []),
        ({"accel_moe_load_report": False}, []),
        ({"num_experts": None}, []),
    ],
)
def test_start_up_says_where_pictures_go(args: dict[str, Any], notes: list[str]) -> None:
    assert FEATURE.prepare is not None
    assert FEATURE.prepare(context(**args)) == notes


def test_start_up_says_that_matplotlib_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_load_report, "find_spec", lambda name: None)
    assert FEATURE.prepare is not None
    (note,) = FEATURE.prepare(context(save="run"))
    assert note == "--accel-moe-load-report 10: no pictures, as matplotlib is not installed"


def test_a_model_without_experts_has_nothing_to_report() -> None:
    assert FEATURE.idle(context(num_experts=None)) == "there are no experts"
    assert FEATURE.idle(context()) is None
    assert FEATURE.idle(Context("cpu", "0.19.2")) is None


def test_captured_routers_are_refused() -> None:
    part = SimpleNamespace(name="attn")
    for args, refused in (
        ({}, False),
        ({"cuda_graph_impl": "local"}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": []}, True),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [part]}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": [part, "moe_router"]}, True),
    ):
        reason = FEATURE.refuses(context(**args))
        assert ("captures routers" in (reason or "")) == refused, args


# --- figures


def test_figures_of_a_layer() -> None:
    even = LayerLoad(1, (5,) * 8, (20, 20))
    assert (even.entropy, even.busiest) == (pytest.approx(1), 0)
    one = LayerLoad(1, (0, 40, 0, 0), (40, 0))
    assert (one.entropy, one.busiest) == (0, 1)
    assert scalars(one)["experts max over mean"] == 4
    assert scalars(one)["ranks max over mean"] == 2
    assert math.copysign(1, one.entropy) == 1, "no -0.0000 in the table"
    half = LayerLoad(1, (20, 20, 0, 0), (40, 0))
    assert half.entropy == pytest.approx(0.5)
    assert LayerLoad(1, (7,), (7,)).entropy == 1
    assert "bytes moved" not in scalars(half)


def test_what_ranks_packed_adds_up() -> None:
    """Two pipeline stages of two expert-parallel ranks; the second stage's layers are 2 and 3."""
    stages = [(Recorder(), Recorder()), (Recorder(), Recorder())]
    maps = torch.rand(5, 6, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    for recorder, routing_map in zip(stages[0], maps, strict=False):
        recorder.note_routing(1, routing_map)
        recorder.note_copies(1, [10, 2], torch.tensor([7, 5]), 100, 0.25)
        recorder.note_copies(1, [9, 3], [9, 3], 0, 0.0)
    stages[1][0].note_routing(3, maps[2])
    stages[1][1].note_routing(3, maps[3] & maps[4], wanted_TE=maps[3])
    world = [r.packed(3, 4, 2, speaks=r is pair[0]) for pair in stages for r in pair]
    first, third = loads(sum(world), 4)
    rows = maps[:2].sum((0, 1))
    assert (first.layer, first.rows) == (1, tuple(rows.tolist()))
    ranks = (int(rows[:2].sum()), int(rows[2:].sum()))
    assert first.ranks == ranks
    assert first.copies == Copies((ranks[0] - 3, ranks[1] + 3), 100, 0.25)
    kept = maps[3] & maps[4]
    assert third == LayerLoad(
        3,
        tuple((maps[2].sum(0) + kept.sum(0)).tolist()),
        tuple((maps[2].sum(0) + kept.sum(0)).view(2, 2).sum(1).tolist()),
        int((maps[3] & ~maps[4]).sum()),
    )


def test_tokens_that_another_rank_holds_too_are_left_out() -> None:
    recorder = Recorder()
    recorder.note_routing(1, torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 2, dtype=torch.bool))
    assert not recorder.packed(1, 2, 1, counts=False).any()
    assert recorder.packed(1, 2, 1)[0, :2].tolist() == [3, 3]


def test_figures_of_several_groups() -> None:
    """Bytes add up, seconds are those of a mean group."""
    groups = Recorder(), Recorder()
    for seconds, recorder in zip((0.1, 0.3), groups, strict=True):
        recorder.note_routing(1, torch.ones(4, 2, dtype=torch.bool))
        recorder.note_copies(1, [6, 2], [4, 4], 10, seconds)
    (found,) = loads(sum(r.packed(1, 2, 2) for r in groups), 2)
    assert found.copies is not None
    assert found.copies.bytes_moved == 20
    assert found.copies.seconds_saved == pytest.approx(0.2)
    assert found.copies.ranks == (4, 12)


def test_copies_are_noted_by_whoever_records_and_once() -> None:
    load.note_copies(1, [2, 0], [1, 1], 5, 0.5)  # nobody does
    with reporting() as recorder:
        recorder.note_routing(1, torch.eye(EXPERTS, dtype=torch.bool))

        def layer(x: torch.Tensor) -> torch.Tensor:
            load.note_copies(1, [6, 2], [4, 4], 5, 0.5)
            return x.exp()

        checkpoint(layer, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
        (found,) = loads(recorder.packed(1, EXPERTS, 2), EXPERTS)
    assert found.copies == Copies((2, 6), 5, 0.5)


def test_loads_must_be_one_of_each_rank() -> None:
    with pytest.raises(ValueError, match=r"shapes \[2\] and \[3\]: give one of each rank"):
        Recorder().note_copies(1, [1, 2], [1, 1, 1], 0, 0.0)


def test_table_has_one_line_for_each_layer() -> None:
    copies = Copies(ranks=(21, 19), bytes_moved=3 << 19, seconds_saved=0.00123)
    layers = [LayerLoad(2, (16, 8, 8, 8), (24, 16), 8, copies), LayerLoad(60, (5, 5), (10,))]
    assert [line.split() for line in table(layers).splitlines()[1:]] == [
        ["2", "40", "1.200", "1.050", "1.600", "0", "0.9610", "8", "1.5", "1.230"],
        ["60", "10", "1.000", "-", "1.000", "0", "1.0000", "0", "-", "-"],
    ]
    assert len({len(line) for line in table(layers).splitlines()}) == 1


# --- the report


class Writer:
    """TensorBoard's, and that of Weights & Biases."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.logged: list[tuple[dict[str, float], int]] = []

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.scalars[name, iteration] = value

    def log(self, values: dict[str, float], iteration: int) -> None:
        self.logged.append((values, iteration))


@contextmanager
def logging(monkeypatch: pytest.MonkeyPatch, every: int = 2, **args: Any) -> Iterator[Any]:
    """Megatron's ``training_log`` as it is wrapped, around one that returns True."""
    shown = {
        "num_layers": 1,
        "mtp_num_layers": None,
        "num_experts": EXPERTS,
        "sequence_parallel": False,
        "tensorboard_dir": None,
        "save": None,
    }
    import megatron.training

    given = SimpleNamespace(**{**shown, **args})
    monkeypatch.setattr(megatron.training, "get_args", lambda: given)
    with reporting(every=every):
        yield moe_load_report.told(lambda *args, **kwargs: True)


def test_every_nth_iteration_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from megatron.training import global_vars

    board, wandb = Writer(), Writer()
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", board)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", wandb)
    with logging(monkeypatch, tensorboard_dir=str(tmp_path / "board")) as training_log:
        layer = build()
        maps = dispatched(layer)
        for iteration in range(1, 5):
            ON.value.recorder.clear()
            layer(tokens(iteration))
            assert training_log({}, {}, 1e-3, iteration, 1.0, pg_collection=None) is True
    printed = capsys.readouterr().out
    said = [line for line in printed.splitlines() if line.startswith("accel:")]
    assert said == [f"accel: loads of experts, iteration {i}:" for i in (2, 4)]
    assert len(printed.splitlines()) == 6
    assert {iteration for _, iteration in board.scalars} == {2, 4}
    fourth = maps[3].sum(0)
    assert board.scalars["accel/moe/layer 1/experts max over mean", 4] == float(
        fourth.max() * EXPERTS / fourth.sum()
    )
    assert board.scalars["accel/moe/layer 1/rows", 4] == 2 * TOKENS
    assert {(n, i): v for values, i in wandb.logged for n, v in values.items()} == board.scalars
    pictures = sorted((tmp_path / "board" / "moe_load").iterdir())
    assert [p.name for p in pictures] == ["iter_0000002.png", "iter_0000004.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


def test_curves_show_what_copies_did(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import global_vars

    board = Writer()
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", board)
    with logging(monkeypatch, every=1) as training_log:
        layer = build()
        for iteration, copied in enumerate((True, False), 1):
            ON.value.recorder.clear()
            layer(tokens(iteration))
            if copied:
                load.note_copies(1, [2 * TOKENS], [2 * TOKENS - 3], 4096, 0.25)
            training_log({}, {}, 1e-3, iteration)
    found = {
        (name.removeprefix("accel/moe/layer 1/"), iteration): value
        for (name, iteration), value in board.scalars.items()
    }
    assert found["bytes moved", 1] == 4096
    assert found["seconds saved", 1] == 0.25
    assert found["ranks max over mean with copies", 1] == 1
    assert ("bytes moved", 2) not in found
    assert ("seconds saved", 2) not in found


def test_without_a_folder_there_is_no_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with logging(monkeypatch, every=1) as training_log:
        build()(tokens(1))
        training_log({}, {}, learning_rate=1e-3, iteration=1)
    assert "loads of experts, iteration 1" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "moe_load").write_text("in the way")
    with logging(monkeypatch, every=1, save=str(tmp_path)) as training_log:
        build()(tokens(1))
        training_log({}, {}, 1e-3, 1)
    assert "accel: no picture of the loads of experts: " in capsys.readouterr().out


def test_a_picture_of_many_layers_and_experts(tmp_path: Path) -> None:
    rows = torch.randint(1, 99, (60, 256), generator=torch.Generator().manual_seed(0)).tolist()
    layers = [LayerLoad(at, tuple(row), (sum(row),)) for at, row in enumerate(rows, 4)]
    load.to_png(layers, tmp_path / "map.png", "rows of experts, iteration 7")
    load.to_png([TWO_EXPERTS], tmp_path / "one.png", "one layer")
    assert (tmp_path / "map.png").stat().st_size < 200_000


@pytest.mark.parametrize(
    ("pattern", "refused"), [("ME/ME", True), ("ME/MM", False), ("ME", False), (None, False)]
)
def test_experts_that_share_a_number_are_refused(pattern: str | None, refused: bool) -> None:
    reason = FEATURE.refuses(context(hybrid_layer_pattern=pattern))
    assert ("have the numbers of the decoder's" in (reason or "")) == refused
