"""What `moe_overlap`, `hot_experts` and `moe_tp_extend_ep` take, refuse and leave alone; one rank."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from accel.feature import Context, choose, read_settings
from accel.parallel.experts import expert_overlap as overlap
from accel.parallel.experts.exchange import Experts
from accel.parallel.experts.plan import Copy
from accel.parallel.experts.streams import OneStream, TwoStreams
from accel.parallel.experts.traffic import Traffic
from accel.patches import FEATURES, hot_experts, moe_overlap, moe_tp_extend_ep, moe_two_streams

ARGS = {
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "tensor_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "moe_token_dispatcher_type": "alltoall",
    "moe_pad_expert_input_to_capacity": False,
}


def context(**args: Any) -> Context:
    return Context("cpu", "0.19.2", SimpleNamespace(**{**ARGS, **args}))


def chosen(wishes: dict[str, Any], **args: Any) -> dict[str, Any]:
    features = [f for f in FEATURES if f.name in ("moe_overlap", "hot_experts")]
    return {c.feature.name: c for c in choose(features, "off", wishes, context(**args))}


def values(wishes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return read_settings(list(chosen(wishes).values()), wishes)


@pytest.mark.parametrize(
    ("device", "state", "reason"),
    [("cuda", "active", ""), ("npu", "active", ""), ("cpu", "idle", "concerns cuda, npu only")],
)
def test_two_streams_bring_the_overlap(device: str, state: str, reason: str) -> None:
    features = [moe_overlap.FEATURE, moe_two_streams.FEATURE]
    here = dataclasses.replace(context(), device=device)
    found = choose(features, "off", {"moe_two_streams": True}, here)
    assert [c.state for c in found] == ["active", state]
    assert found[1].reason == reason


def test_all_layers_have_the_same_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def new(device: torch.device) -> object:
        made.append(object())
        return made[-1]

    module = SimpleNamespace(Stream=new, current_stream=lambda device: "first")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    undo, gpu = overlap.switch_on(5), torch.device("cuda", 0)
    try:
        assert isinstance(overlap.current().streams(gpu), OneStream)
        off = overlap.take_two_streams()
        for _ in range(2):
            streams = overlap.current().streams(gpu)
            assert isinstance(streams, TwoStreams)
            assert streams._streams == ("first", made[0])
        assert len(made) == 1
        off()
        assert isinstance(overlap.current().streams(gpu), OneStream)
    finally:
        undo()


def test_hot_experts_bring_the_overlap() -> None:
    found = chosen({"hot_experts": "4"})
    assert found["hot_experts"].state == found["moe_overlap"].state == "active"
    assert found["moe_overlap"].asked == "required by hot_experts"


@pytest.mark.parametrize(
    ("wishes", "most"),
    [
        ({"hot_experts": "5"}, 5),
        ({"hot_experts": True}, 3),
    ],
)
def test_number_of_hot_experts(wishes: dict[str, Any], most: int) -> None:
    undo = overlap.switch_on(**values(wishes)["moe_overlap"])
    off = hot_experts.switch_on(**values(wishes)["hot_experts"])
    hot = overlap.current().hot
    assert hot is not None
    assert hot.most == most
    off()
    assert overlap.current().hot is None
    undo()


@pytest.mark.parametrize(("given", "every"), [({}, None), ({"hot_experts_every": "4"}, 4)])
def test_how_often_copies_are_planned(given: dict[str, Any], every: int | None) -> None:
    wishes = {"hot_experts": "2", **given}
    undo = overlap.switch_on(**values(wishes)["moe_overlap"])
    off = hot_experts.switch_on(**values(wishes)["hot_experts"])
    hot = overlap.current().hot
    assert hot is not None
    assert hot.every == every
    off()
    undo()


def test_what_is_known_before_tokens_are_routed() -> None:
    ahead, due = overlap.Ahead(), []
    for rows in (10, 20, 20, 20, 20):
        due.append(ahead.due(3))
        ahead.note([[rows, 0], [2 * rows, 0]])
    assert due == [False, True, False, False, True]
    assert ahead.average[1] == pytest.approx([2 * (20 - 10 * 0.9**4), 0])
    ahead.copies = frozenset({Copy(0, 1)})
    ahead.reorder([1, 0])
    assert ahead.average[1] == pytest.approx([0, 2 * (20 - 10 * 0.9**4)])
    assert not ahead.copies, "experts have changed ranks"


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"hot_experts": "2", "hot_experts_every": "0"}, "--accel-hot-experts-every: '0'"),
        ({"hot_experts": "0"}, "--accel-hot-experts: '0' is no number of experts to be copied"),
        ({"hot_experts": "many"}, "--accel-hot-experts: 'many' is no number"),
        ({"hot_experts": "2", "hot_experts_price": "-1"}, "--accel-hot-experts-price: '-1'"),
        ({"hot_experts": "2", "hot_experts_price": "inf"}, "--accel-hot-experts-price: 'inf'"),
        ({"moe_overlap": True, "moe_overlap_slices": "0"}, "--accel-moe-overlap-slices: '0'"),
    ],
)
def test_bad_values_are_one_error(wishes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        values(wishes)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        ({"expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size 2"),
    ],
)
def test_layouts_that_it_does_not_serve_are_an_error(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        chosen({"moe_overlap": True}, **args)


def test_padded_capacities_leave_no_hot_expert() -> None:
    with pytest.raises(ValueError, match="--moe-pad-expert-input-to-capacity"):
        chosen({"hot_experts": "2"}, moe_pad_expert_input_to_capacity=True)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"num_experts": None}, "there are no experts"),
        ({"expert_model_parallel_size": 1}, "there is one expert-parallel rank"),
    ],
)
def test_idle_where_nothing_travels(args: dict[str, Any], why: str) -> None:
    found = chosen({"hot_experts": "2"}, **args)
    assert found["moe_overlap"].state == "idle"
    assert found["moe_overlap"].reason == why
    assert found["hot_experts"].state == "idle"


def test_ranks_of_the_attention_hold_whole_experts() -> None:
    asked = context(accel_moe_tp_extend_ep=True, tensor_model_parallel_size=2)
    (line,) = moe_tp_extend_ep.prepare(asked)
    assert asked.args.expert_tensor_parallel_size == 1
    assert asked.args.expert_model_parallel_size == 4
    assert line.endswith("--expert-tensor-parallel-size 1 --expert-model-parallel-size 4")


def test_without_a_command_line_there_is_nothing_to_multiply() -> None:
    reason = moe_tp_extend_ep.FEATURE.idle(Context("cpu", "0.19.2"))
    assert "set expert_tensor_parallel_size=1" in str(reason)


def test_ranks_are_multiplied_once() -> None:
    asked = context(accel_moe_tp_extend_ep=True, tensor_model_parallel_size=2)
    moe_tp_extend_ep.prepare(asked)
    assert moe_tp_extend_ep.prepare(asked) == []
    assert asked.args.expert_model_parallel_size == 4
    assert asked.args.expert_model_parallel_size_given == 2


@pytest.mark.parametrize("asked_there", [True, False])
def test_ranks_from_a_checkpoint_are_multiplied_already(
    asked_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import checkpointing

    there = context(accel_moe_tp_extend_ep=asked_there, tensor_model_parallel_size=2)
    moe_tp_extend_ep.prepare(there)

    def load_args_from_checkpoint(args: Any, load_arg: str) -> Any:
        return (args, there.args) if load_arg == "pretrained_checkpoint" else args

    monkeypatch.setattr(checkpointing, "load_args_from_checkpoint", load_args_from_checkpoint)
    restored = {"use_checkpoint_args": True, "use_mp_args_from_checkpoint_args": True}
    size = there.args.expert_model_parallel_size
    here = context(
        accel_moe_tp_extend_ep=True,
        tensor_model_parallel_size=2,
        expert_model_parallel_size=size,
        **restored,
    )
    moe_tp_extend_ep.prepare(here)
    assert size == (4 if asked_there else 2)
    assert here.args.expert_model_parallel_size == 4
    assert here.args.expert_tensor_parallel_size == 1
    assert here.args.expert_model_parallel_size_given == 2


def test_ranks_of_the_attention_stay_as_they_are_unless_asked() -> None:
    asked = context(tensor_model_parallel_size=2)
    assert moe_tp_extend_ep.prepare(asked) == []
    assert asked.args.expert_model_parallel_size == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size 2 splits them"),
        ({"tensor_model_parallel_size": 3}, "--num-experts 8 is no multiple of 6"),
    ],
)
def test_whole_experts_that_cannot_be_are_an_error(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        moe_tp_extend_ep.prepare(context(accel_moe_tp_extend_ep=True, **args))


def test_layers_that_run_as_stock_say_why() -> None:
    dispatcher = SimpleNamespace(tp_size=1)
    layer = SimpleNamespace(config=SimpleNamespace(), token_dispatcher=dispatcher)
    assert moe_overlap.unserved(layer) == "the dispatcher SimpleNamespace"


def test_switched_off_the_dispatcher_has_its_shared_experts_back(monkeypatch) -> None:
    monkeypatch.setattr(moe_overlap, "served", lambda layer: True)

    class Layer:
        use_shared_expert = shared_expert_overlap = True
        layer_number = 1
        shared_experts = object()

    layer = Layer()
    layer.token_dispatcher = SimpleNamespace(shared_experts=layer.shared_experts)
    off = moe_overlap.switch_on(2)
    moe_overlap.beside_the_journey(lambda self, hidden_states: None)(layer, None)
    assert layer.token_dispatcher.shared_experts is None
    off()
    assert layer.token_dispatcher.shared_experts is layer.shared_experts


def test_a_rank_is_that_of_the_dispatchers_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core 0.17's dispatcher has no `ep_rank`."""
    counts = [[2, 1, 0, 3], [1, 1, 1, 1]]

    def gather(whole: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        whole.copy_(torch.tensor([[*row, 100] for row in counts]))

    monkeypatch.setattr(moe_overlap.dist, "all_gather_into_tensor", gather)
    dispatcher = SimpleNamespace(
        ep_size=2,
        ep_group=SimpleNamespace(rank=lambda: 1),
        tp_size=1,
        drop_and_pad=False,
        num_experts=4,
        num_local_experts=2,
        local_expert_indices=[2, 3],
        permute_idx_device=torch.device("cpu"),
        config=SimpleNamespace(moe_router_padding_for_quantization=False),
    )
    routed = torch.eye(4, dtype=torch.bool)
    assert moe_overlap.counting_all(lambda *_: None)(dispatcher, routed).tolist() == [1, 4]
    assert dispatcher.num_out_tokens == 4
    assert dispatcher.input_splits.tolist() == [2, 2]
    assert dispatcher.output_splits.tolist() == [3, 2]
    assert dispatcher.accel_free == [100, 100]


def test_padded_capacities_are_compared_with_what_is_free_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All micro-batches of a size have as many rows, and the host need not wait for the device."""
    monkeypatch.setattr(
        moe_overlap.dist, "all_gather_into_tensor", lambda whole, mine, group: whole.fill_(100)
    )
    dispatcher = SimpleNamespace(
        ep_size=2, ep_group=None, tp_size=1, drop_and_pad=True, num_experts=4, capacity=0
    )
    dispatcher.config = SimpleNamespace(moe_router_padding_for_quantization=False)
    routed, counting = torch.eye(4, dtype=torch.bool), moe_overlap.counting_all(lambda *_: None)
    found = []
    for capacity in (5, 5, 6, 5):
        dispatcher.capacity = capacity
        counting(dispatcher, routed)
        assert dispatcher.accel_counts == [[capacity] * 4] * 2
        found.append(dispatcher.accel_free)
    assert found == [[100, 100], None, [100, 100], None]
    with torch.no_grad():  # an evaluation, which takes less, is compared apart
        counting(dispatcher, routed)
    assert dispatcher.accel_free == [100, 100]


def test_autocast_is_left_to_stock() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    dispatcher = object.__new__(MoEAlltoAllTokenDispatcher)
    dispatcher.tp_size = 1
    config = SimpleNamespace(
        moe_router_padding_for_quantization=False, transformer_impl="transformer_engine"
    )
    layer = SimpleNamespace(
        config=config,
        token_dispatcher=dispatcher,
        parameters=lambda: iter([torch.ones(1)]),
    )
    assert moe_overlap.unserved(layer) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert moe_overlap.unserved(layer) == "autocast"


def test_a_layer_that_runs_as_stock_is_counted_as_stock() -> None:
    """Its routing may be part of a CUDA graph, which must not wait for the host."""
    dispatcher = SimpleNamespace(ep_size=2, accel_serves=False)
    found = moe_overlap.counting_all(lambda self, routing_map: "stock")(dispatcher, torch.ones(1))
    assert found == "stock"
    assert dispatcher.accel_counts is None


@pytest.mark.parametrize(("training", "stages"), [(True, 1), (True, 2), (False, 1)])
@pytest.mark.parametrize(
    ("given", "width", "between"),
    [({}, 64, 3 * 16), ({"moe_latent_size": 8}, 8, 3 * 16), ({"gated": False}, 64, 2 * 16)],
)
def test_bytes_of_rows_and_copies(
    given: dict[str, Any], width: int, between: int, training: bool, stages: int
) -> None:
    config = SimpleNamespace(
        hidden_size=64,
        moe_ffn_hidden_size=16,
        moe_latent_size=given.get("moe_latent_size"),
        gated_linear_unit=given.get("gated", True),
        params_dtype=torch.bfloat16,
        pipeline_model_parallel_size=stages,
    )
    sizes = moe_overlap._sizes(config, experts(into_main_grad=True), training)
    backward = training and stages == 1
    assert sizes.own == 2 * 2 * width
    assert sizes.in_place == 2 * (width * backward + between * training)
    assert sizes.computed == sizes.in_place + 2 * 2 * width
    assert sizes.matrices == 2 * 10
    assert sizes.gradients == 4 * 10 * backward


def experts(into_main_grad: bool, main: torch.dtype = torch.float32) -> Experts:
    """Two of 6 and 4 numbers."""
    weights: tuple[list[Any], list[Any]] = (
        [torch.zeros(3, 2, dtype=torch.bfloat16) for _ in range(2)],
        [torch.zeros(2, 2, dtype=torch.bfloat16) for _ in range(2)],
    )
    for weight in (*weights[0], *weights[1]):
        weight.main_grad = torch.zeros_like(weight, dtype=main)
    return Experts(mlp, weights, into_main_grad)


def mlp(x: Any, probs: Any, counts: torch.Tensor, first: Any, second: Any) -> torch.Tensor:
    return second(first(x)[:, :2]) * counts.sum()


@pytest.mark.parametrize(
    ("into_main_grad", "main", "each"),
    [(True, torch.float32, 40), (True, torch.bfloat16, 20), (False, torch.float32, 20)],
)
def test_bytes_that_copies_move(
    into_main_grad: bool, main: torch.dtype, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned ahead, one may have no rows: then no gradient goes back."""
    noted: list[Any] = []
    monkeypatch.setattr(overlap.load, "ON", [None])
    monkeypatch.setattr(overlap.load, "note_copies", lambda *told: noted.append(told))
    hot = overlap.HotExperts(2, price=1.0)
    monkeypatch.setattr(hot, "cost", lambda group, experts: overlap.Cost(1.0, 1.0))
    counts = [[5, 0, 0, 0], [5, 0, 0, 0]]
    traffic = Traffic(counts, 0, frozenset([Copy(0, 1), Copy(1, 1)]))
    hot.note(3, traffic, None, experts(into_main_grad, main))  # type: ignore[arg-type]
    ((layer, before, after, moved, _),) = noted
    assert (layer, before, after) == (3, [10, 0], [5, 5])
    assert moved == 2 * 20 + each


@pytest.mark.parametrize(
    ("launch", "each"),
    [(1.0, 1e-3), (1.0, 0.0), (0.0, 1e-3)],
    ids=["both", "launches alone", "rows alone"],
)
def test_a_row_costs_what_more_rows_take_longer(
    launch: float, each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the launch and the reading of matrices take; and never nothing."""
    rows: list[int] = []
    given = experts(into_main_grad=False)

    def seconds(call: Any, like: Any, group: Any) -> float:
        rows.clear()
        call()
        return launch + each * rows[0] if rows else 0.5

    monkeypatch.setattr(overlap, "_seconds", seconds)
    monkeypatch.setattr(overlap, "Messages", lambda *args: MagicMock())
    monkeypatch.setattr(overlap.dist, "all_reduce", lambda *args, **kwargs: None)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    counting = dataclasses.replace(given, mlp=lambda x, *rest: rows.append(len(x)) or mlp(x, *rest))
    cost = overlap.measured_cost(group, counting)  # type: ignore[arg-type]
    assert cost.copy == pytest.approx(1.0)
    assert cost.row == pytest.approx(3 * (each or 0.1 * launch / 2048))
