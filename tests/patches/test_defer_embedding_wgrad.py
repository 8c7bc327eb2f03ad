"""The output layer's gradient is there before it is reduced, whoever asks for the reduction first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import accel
from accel.feature import Context
from accel.patches import defer_embedding_wgrad as feature
from accel.patches.defer_embedding_wgrad import Deferred, then_reducing, when_all_are_there


class Layer:
    """As far as ``ColumnParallelLinear.__init__`` goes."""

    def __init__(
        self, config: Any, inputs: list[Tensor] | None, gradients: list[Tensor] | None
    ) -> None:
        self.config = config
        self.weight = Parameter(torch.ones(2))
        self.embedding_activation_buffer = inputs
        self.grad_output_buffer = gradients


def made(put_off: bool, *lists: list[Tensor] | None) -> Layer:
    layer = Layer.__new__(Layer)
    config = SimpleNamespace(defer_embedding_wgrad_compute=put_off)
    feature.with_a_list(Layer.__init__)(layer, config, *lists)
    return layer


class Group:
    """As far as a bucket group's ``start_grad_sync`` goes."""

    def __init__(self, *params: Parameter) -> None:
        self.params = set(params)
        self.reduced: list[dict[str, bool]] = []

    def start(self, **options: bool) -> None:
        assert not torch.is_grad_enabled()
        self.reduced.append(options)


@torch.no_grad()
def start(group: Group, **options: bool) -> None:
    when_all_are_there(Group.start)(group, **options)


def drain(
    config: Any, inputs: list[Tensor], gradients: list[Tensor], weight: Parameter, group: Any
) -> None:
    gradients.clear()


def test_a_reduction_waits_for_the_gradient_that_is_put_off():
    gradients: list[Tensor] = []
    output, other = made(True, [], gradients), made(True, None, None)
    bucket, another = Group(output.weight, other.weight), Group(made(True, None, None).weight)
    gradients.append(torch.ones(2))
    start(bucket, force_all_reduce=True)
    start(another)
    assert (bucket.reduced, another.reduced) == ([], [{}])
    then_reducing(drain)(None, [], gradients, output.weight, None)
    assert bucket.reduced == [{"force_all_reduce": True}]
    then_reducing(drain)(None, [], gradients, output.weight, None)
    assert len(bucket.reduced) == 1, "begun once"
    start(bucket)
    assert len(bucket.reduced) == 2, "nothing is put off"


def test_layers_without_a_list_keep_nothing():
    other = made(True, None, None)
    other.embedding_activation_buffer.append(torch.ones(2))
    assert other.embedding_activation_buffer == []
    assert Deferred.of(other.weight) is None
    assert made(False, None, None).embedding_activation_buffer is None
    assert Deferred.of(made(False, [], []).weight) is None


def test_inputs_without_a_backward_pass_are_not_kept():
    def forward(layer: Layer, x: Tensor) -> Tensor:
        layer.embedding_activation_buffer.append(x)
        return x

    kept: list[Tensor] = []
    output, x = made(True, kept, []), torch.ones(2)
    keeping = feature.keeping_for_a_backward_pass(forward)
    with torch.no_grad():
        assert keeping(output, x) is x
    assert output.embedding_activation_buffer is kept
    assert not kept
    keeping(output, x)
    assert len(kept) == 1


def test_a_configuration_with_multi_token_prediction_is_an_error():
    config = SimpleNamespace(defer_embedding_wgrad_compute=True, mtp_num_layers=1)
    with pytest.raises(ValueError, match="mtp_num_layers=1: upstream adds"):
        feature.with_a_list(Layer.__init__)(Layer.__new__(Layer), config, [], [])


def test_a_single_gradient_has_the_inputs_of_all_ranks(monkeypatch: pytest.MonkeyPatch):
    whole, dy = torch.randn(6, 1, 8), torch.randn(6, 1, 4)

    def gather(out: Tensor, x: Tensor, group: Any) -> None:
        assert torch.equal(x, whole[:3])
        out.copy_(whole)

    monkeypatch.setattr(feature.dist, "all_gather_into_tensor", gather)
    weight = Parameter(torch.zeros(4, 8))
    weight.main_grad = torch.zeros(4, 8)
    config = SimpleNamespace(sequence_parallel=True)
    group = SimpleNamespace(size=lambda: 2)
    then_reducing(drain)(config, [whole[:3]], [dy], weight, group)
    torch.testing.assert_close(weight.main_grad, dy[:, 0].t() @ whole[:, 0])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_gradients_can_be_put_off(count: int):
    """Upstream's function raises UnboundLocalError for one."""
    from megatron.core import utils

    accel.enable(preset="off")
    try:
        group = SimpleNamespace(size=lambda: 1)
        config = SimpleNamespace(sequence_parallel=False, gradient_accumulation_fusion=True)
        inputs = [torch.randn(5, 1, 8) for _ in range(count)]
        gradients = [torch.randn(5, 1, 4) for _ in range(count)]
        expected = sum(dy[:, 0].t() @ x[:, 0] for x, dy in zip(inputs, gradients, strict=True))
        weight = Parameter(torch.zeros(4, 8))
        weight.main_grad = torch.zeros(4, 8)
        utils.drain_embedding_wgrad_compute(config, inputs, gradients, weight, group)
        assert (inputs, gradients) == ([], [])
        torch.testing.assert_close(weight.main_grad, expected)
    finally:
        accel.disable()


@pytest.mark.parametrize(
    ("put_off", "mtp", "lines"), [(True, 1, 1), (True, None, 0), (False, 1, 0), (False, None, 0)]
)
def test_not_with_multi_token_prediction(put_off: bool, mtp: int | None, lines: int):
    args = SimpleNamespace(defer_embedding_wgrad_compute=put_off, mtp_num_layers=mtp)
    context = Context("cpu", "0.19.2", args)
    told = feature.FEATURE.prepare(context)
    assert len(told) == lines
    assert args.defer_embedding_wgrad_compute is (put_off and not lines)
    assert (feature.FEATURE.idle(context) is None) is args.defer_embedding_wgrad_compute


def test_programs_without_a_command_line_may_put_it_off():
    assert feature.FEATURE.idle(Context("cpu", "0.19.2")) is None


def test_a_step_begins_with_no_gradients_of_one_that_raised():
    model = torch.nn.Module()
    model.output_layer = torch.nn.Linear(2, 2)
    kept = [torch.ones(2)]
    deferred = Deferred(kept, lambda: None)
    setattr(model.output_layer.weight, feature._ATTRIBUTE, deferred)
    for found in (None, model):
        clear = feature.with_its_gradients(lambda config, model, last: model)
        assert clear(None, found, True) is found
        assert len(kept) == (found is None)
    assert deferred.reduction is None
