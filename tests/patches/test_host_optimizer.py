"""`--accel-host-optimizer` steps as stock does, with states on the host; its state dicts are stock's."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.device.cpu import memory
from accel.feature import Context, choose, read_settings
from accel.memory.host_adam import HostAdam
from accel.memory.host_split import Rates
from accel.patches import _inner_masters, command_line, host_optimizer
from tests.ops.contract import needs_native

from .test_fused_adamw import build, one_rank, one_step
from .test_shared_weights import ARGS as OF_SHARED
from .test_shared_weights import BOTH, REFUSED, assert_same, built, load, masters, moments

pytestmark = needs_native
GIB = 1 << 30
RATIOS = pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])


@BOTH
@RATIOS
@pytest.mark.parametrize("shared", [False, True], ids=["whole masters", "shared weights"])
def test_steps_are_those_of_states_on_the_device(
    distributed: bool, ratio: float, shared: bool
) -> None:
    """With a step that is skipped, and frozen parameters."""
    options = {"loss_scale": 1024.0, "frozen": True}
    found = []
    for host in ({}, {"host_optimizer": True, "host_optimizer_ratio": ratio}):
        with one_rank(fused_adamw=True, shared_weights=shared, **host):
            model, optimizer, inner = built(distributed, **options)
            assert isinstance(inner.optimizer, HostAdam) is bool(host)
            log = [one_step(model, optimizer, i, optimizer.get_loss_scale()) for i in range(4)]
            found.append((log, masters(model, inner), moments(inner)))
    assert [successful for successful, *_ in found[0][0]] == [True, False, True, True]
    assert found[0][0] == found[1][0]
    for ours, stock in zip(found[1][1:], found[0][1:], strict=True):
        assert all(map(torch.equal, ours, stock))


@BOTH
def test_weights_from_elsewhere_are_the_masters_then(distributed: bool) -> None:
    found = []
    for host in ({}, {"host_optimizer": True}):
        with one_rank(fused_adamw=True, **host):
            model, optimizer, inner = built(distributed)
            one_step(model, optimizer, 0)
            for p in model.parameters():
                p.data.mul_(1.5)
            optimizer.reload_model_params()
            one_step(model, optimizer, 1)
            found.append(masters(model, inner))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("saved_on_host", [True, False])
def test_state_dicts_of_the_plain_optimizer_are_stocks_both_ways(saved_on_host: bool) -> None:
    host: dict[str, Any] = {"host_optimizer": True}
    first, then = (host, {}) if saved_on_host else ({}, host)
    with one_rank(fused_adamw=True, **first):
        model, optimizer, inner = built(False)
        for step in range(3):
            one_step(model, optimizer, step)
        saved = copy.deepcopy(optimizer.state_dict())
        weights = [p.detach().clone() for p in model.parameters()]
        one_step(model, optimizer, 3)
        expected = masters(model, inner)
    with one_rank(fused_adamw=True, **then):
        model, optimizer, inner = built(False)
        load(model, optimizer, weights, saved)
        assert_same(optimizer.state_dict(), saved)
        one_step(model, optimizer, 3)
        assert all(map(torch.equal, masters(model, inner), expected))


def layers(count: int, distributed: bool) -> tuple[Any, Any]:
    """Square layers of a Mi weights each, and their optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    sharded = {"use_distributed_optimizer": distributed}
    linear = [torch.nn.Linear(1024, 1024, bias=False).bfloat16() for _ in range(count)]
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, **sharded),
        torch.nn.Sequential(*linear),
    )
    config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, clip_grad=1.0, **sharded)
    return model, get_megatron_optimizer(config, [model])


@BOTH
def test_a_device_holds_weights_and_gradients_alone(distributed: bool) -> None:
    """From the first step to a loaded checkpoint, under a limit that states on the device exceed."""
    count, bucket = 8, 1 << 18
    numel = count << 20

    def limit() -> Any:
        """Two buckets, the gradients that this test draws, and 1 MiB for what is small."""
        more = 2 * 12 * bucket + 4 * numel + (1 << 20)
        return memory.limit(memory.memory_allocated() + more)

    def with_buckets(optimizer: Any) -> Any:
        (inner,) = optimizer.chained_optimizers
        inner.optimizer.host = replace(inner.optimizer.host, bucket_numel=bucket)
        return inner

    with one_rank(fused_adamw=True, host_optimizer=True, host_optimizer_ratio=0.5):
        model, optimizer = layers(count, distributed)
        inner = with_buckets(optimizer)
        with limit():
            for step in range(2):
                one_step(model, optimizer, step)
        states = sum(a.num_bytes() for a in inner.optimizer._all_arenas())
        assert states >= 12 * numel
        saved = optimizer.state_dict()
        other, loading = layers(count, distributed)
        with_buckets(loading)
        with limit():
            loading.load_state_dict(saved)
            one_step(other, loading, 2)
    with one_rank(fused_adamw=True):
        model, optimizer = layers(count, distributed)
        with limit(), pytest.raises(torch.OutOfMemoryError):
            one_step(model, optimizer, 0)


@BOTH
def test_some_gib_stay_within_the_size(distributed: bool) -> None:
    with one_rank(fused_adamw=True, host_optimizer=0.03, host_optimizer_ratio=1.0):
        model, optimizer = layers(4, distributed)
        one_step(model, optimizer, 0)
        (inner,) = optimizer.chained_optimizers
        kept = sum(arena.num_bytes() for arena in inner.optimizer._all_arenas())
        assert 2 * 12 << 20 < kept <= 0.03 * GIB  # two layers of four


@BOTH
def test_the_first_stages_copy_of_a_tied_embedding_is_stepped_by_the_device(
    distributed: bool,
) -> None:
    """As the last stage's, which upstream marks otherwise too."""
    with one_rank(host_optimizer=True, host_optimizer_ratio=1.0):
        model, optimizer, inner = built(distributed, tied=True)
        one_step(model, optimizer, 0)
        adam, tied = inner.optimizer, next(model.parameters())
        stepped = {p.data_ptr(): adam.ratio(a, torch.float32) for p, a in adam._arenas.items()}
    assert stepped.pop(tied.data_ptr()) == 0
    assert set(stepped.values()) == {1.0}


def test_the_share_of_the_host_is_measured_when_the_optimizer_is_built() -> None:
    with one_rank(host_optimizer=True):
        _, _, inner = built(True)
        assert isinstance(inner.optimizer.host.rates, Rates)
        assert inner.optimizer.host.ratio is None
    with one_rank(host_optimizer="all", host_optimizer_ratio="0.25"):
        _, _, inner = built(True)
        assert inner.optimizer.host.rates is None
        assert inner.optimizer.host.ratio == 0.25
    assert not _inner_masters.WANTED


def test_an_fp32_optimizer_stays_as_it_is_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with one_rank(host_optimizer=True), caplog.at_level(logging.WARNING, "accel"):
        model, optimizer = build()
        assert "host_optimizer: this optimizer keeps its own masters: parameters are fp32" in (
            caplog.text
        )
        assert one_step(model, optimizer, 0)[0]


def test_ranks_without_parameters_measure_too() -> None:
    """Or those that have some would wait for them."""
    called = []
    with one_rank(host_optimizer=True):
        host_optimizer.measured(lambda *args: called.append(args))("config", [])
        assert called == [("config", [])]
        assert _inner_masters.WANTED["host_optimizer"].rates is not None


@BOTH
@pytest.mark.parametrize("feature", ["host_optimizer", "shared_weights"])
def test_a_configuration_may_be_copied(distributed: bool, feature: str) -> None:
    with one_rank(**{feature: True}):
        _, _, inner = built(distributed)
        again = replace(inner.config, lr=0.5)
        names = ("use_precision_aware_optimizer", "store_param_remainders")
        assert [getattr(again, n) for n in names] == [getattr(inner.config, n) for n in names]
        assert again.use_precision_aware_optimizer_no_fp8_or_ds_fp8


@pytest.mark.parametrize("feature", ["host_optimizer", "shared_weights"])
def test_masters_are_the_optimizers_under_any_fp8_recipe(feature: str) -> None:
    with one_rank(fused_adamw=True, **{feature: True}):
        model, optimizer, inner = built(True, fp8_recipe="tensorwise")
        one_step(model, optimizer, 0)
        assert {p.dtype for g in inner.optimizer.param_groups for p in g["params"]} == {
            torch.bfloat16
        }


@BOTH
def test_upstreams_offloading_is_refused(distributed: bool) -> None:
    with one_rank(host_optimizer=True):
        _, optimizer, _ = built(distributed)
        with pytest.raises(ValueError, match="--accel-host-optimizer keeps states in host memory"):
            optimizer.offload_to_cpu()


# What is asked for

ARGS = {**OF_SHARED, "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        *REFUSED,
        (
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16},
            "--exp-avg-dtype torch.bfloat16: states on the host are fp32",
        ),
        ({"accel_host_optimizer": ("1", "2", "3")}, "3 sizes for 2 pipeline stages"),
    ],
)
def test_what_cannot_be_on_the_host_is_refused_by_name(changed: dict[str, Any], text: str) -> None:
    features = [host_optimizer.FEATURE]
    context = Context("cpu", "0.19.2", SimpleNamespace(**{**ARGS, **changed}))
    with pytest.raises(ValueError, match=f"^--accel-host-optimizer.*{text}"):
        choose(features, "off", {"host_optimizer": ["all"]}, context)
    (choice,) = choose(features, "max", {}, context)
    assert choice.state == "off"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"host_optimizer": ["0"]}, "--accel-host-optimizer: '0' is no size: give GiB"),
        ({"host_optimizer": 0}, "--accel-host-optimizer: 0 is no size"),
        ({"host_optimizer": ["8", "lots"]}, "'lots' is no size"),
        ({"host_optimizer": "nan"}, "'nan' is no size"),
        ({"host_optimizer": True, "host_optimizer_ratio": "1.5"}, "ratio: '1.5' is no share"),
        ({"host_optimizer": "1e300"}, "'1e300' is no size"),
        ({"host_optimizer": [10**400]}, "is no size"),
        ({"host_optimizer": 1e-12}, "1e-12 is no size"),
        ({"host_optimizer": True, "host_optimizer_ratio": True}, "True is no share"),
        ({"host_optimizer_ratio": "0.5"}, "0.5 does nothing without --accel-host-optimizer"),
    ],
)
def test_a_value_that_means_nothing_is_named(given: dict[str, Any], text: str) -> None:
    context = Context("cpu", "0.19.2", SimpleNamespace(**ARGS))
    choices = choose([host_optimizer.FEATURE], "off", given, context)
    with pytest.raises(ValueError, match=text):
        read_settings(choices, given)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("", (None,)),
        ("all", (None,)),
        ("1.5", (3 * GIB // 2,)),
        ("4 all", (4 * GIB, None)),
    ],
)
@pytest.mark.parametrize("flag", ["--accel-host-optimizer", "--virtual-optimizer"])
def test_sizes_on_the_command_line(flag: str, words: str, sizes: tuple) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command_line.add_options(parser)
    args = parser.parse_args([flag, *words.split(), "--accel-host-optimizer-ratio", "0.5"])
    wishes = {name.removeprefix("accel_"): value for name, value in vars(args).items()}
    choices = choose(
        [host_optimizer.FEATURE], "off", wishes, Context("cpu", "0.19.2", SimpleNamespace(**ARGS))
    )
    assert read_settings(choices, wishes) == {"host_optimizer": {"value": sizes, "ratio": 0.5}}
    assert parser.parse_args(["--swap-optimizer"]).accel_host_optimizer == []
    assert parser.parse_args(["--no-accel-host-optimizer"]).accel_host_optimizer is False
