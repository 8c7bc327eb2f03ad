"""The output layer's gradient is there before it is reduced, whoever asks for the reduction first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

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
