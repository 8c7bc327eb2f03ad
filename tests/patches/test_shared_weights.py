"""`--accel-shared-weights` steps as stock does, in 4 bytes for a weight and its master; its state dicts are
stock's own."""

from __future__ import annotations

import copy
import hashlib
import logging
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.device.cpu import memory
from accel.feature import Context, choose
from accel.memory.precision_aware_adam import PrecisionAwareAdam
from accel.patches import shared_weights
from accel.patches._param_states import ParamStates
from accel.upstream import SUPPORTED_MEGATRON
from tests.ops.contract import needs_native
from tests.versions import output_with, run_on

from .test_fused_adamw import HYPER, build, one_rank, one_step, take_steps

pytestmark = needs_native
BOTH = pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])


def built(distributed: bool, **options: Any) -> tuple[Any, Any, Any]:
    """Model, optimizer, and the one that it is made of."""
    model, optimizer = build(bf16=True, use_distributed_optimizer=distributed, **options)
    (inner,) = optimizer.chained_optimizers
    return model, optimizer, inner


def masters(model: Any, inner: Any) -> list[Tensor]:
    """In fp32, of stock's optimizers or ours; in the order of the model's parameters."""
    if not isinstance(inner.optimizer, PrecisionAwareAdam):
        return [p.main_param.detach().view(p.shape).clone() for p in trained(model)]
    shards = {p.data_ptr(): p for p in inner.optimizer.state}
    told = inner.optimizer.get_unscaled_state
    return [
        told(shards[p.data_ptr()], "master_param").view(p.shape).clone() for p in trained(model)
    ]


def moments(inner: Any) -> list[Tensor]:
    states = [inner.optimizer.state[p] for g in inner.optimizer.param_groups for p in g["params"]]
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def trained(model: Any) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def ties(master: Tensor) -> Tensor:
    """Which numbers lie halfway between two of bf16, the lower one even."""
    return (master.view(torch.int32) & 0x1FFFF) == 0x8000


@BOTH
def test_200_steps_are_those_of_stock_but_for_ties(distributed: bool) -> None:
    with one_rank(fused_adamw=True):
        model, optimizer, inner = built(distributed)
        norms, tied = [], [torch.zeros(p.shape, dtype=torch.bool) for p in trained(model)]
        for step in range(200):
            norms.append(one_step(model, optimizer, step))
            for seen, master in zip(tied, masters(model, inner), strict=True):
                seen |= ties(master)
        expected = masters(model, inner), moments(inner)
    with one_rank(fused_adamw=True, shared_weights=True):
        ours, optimizer, inner = built(distributed)
        assert [one_step(ours, optimizer, step) for step in range(200)] == norms
        found = masters(ours, inner), moments(inner)
    count = sum(int(seen.sum()) for seen in tied)
    print(f"{count} ties in {200 * sum(seen.numel() for seen in tied)} masters")
    assert count > 0, "no tie was met: another seed"
    for a, b in zip(found[1], expected[1], strict=True):
        assert torch.equal(a, b)
    for i, p in enumerate(trained(ours)):
        a, b = found[0][i], expected[0][i]
        assert torch.equal(a[~tied[i]], b[~tied[i]])
        ulps = (a.view(torch.int32) - b.view(torch.int32)).abs()
        assert ulps.max() <= 4
        assert torch.equal(p.detach(), a.bfloat16())


APEX = """
import torch

class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **options):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

class FusedSGD(FusedAdam):
    pass
"""


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_steps_where_megatron_has_another_adam(version: str, tmp_path: Path) -> None:
    """Apex's here, and Transformer Engine's: upstream asks the distributed optimizer for its class."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    (tmp_path / "apex" / "optimizers.py").write_text(APEX)
    code = f"import {__name__} as test; test.print_steps()"
    alone, beside = output_with(version, code), output_with(version, code, tmp_path)
    assert alone.splitlines() == ["False", *beside.splitlines()[1:]]
    assert beside.startswith("True")


def print_steps() -> None:
    """Whether Megatron has another library's Adam, and what three steps, a checkpoint and one more make."""
    from megatron.core.optimizer import distrib_optimizer

    print(distrib_optimizer.HAVE_APEX_OR_TE)
    by_flag = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
    for feature, options in (
        ("shared_weights", {}),
        ("shared_weights", {"use_distributed_optimizer": True}),
        ("host_optimizer", {"use_distributed_optimizer": True}),
        ("precision_aware_optimizer", by_flag),
    ):
        with one_rank(fused_adamw=True, adam_resume=True, **{feature: True}):
            model, optimizer = build(bf16=True, **options)
            for step in range(3):
                one_step(model, optimizer, step)
            other, resumed = build(bf16=True, **options)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            one_step(other, resumed, 3)
            for each, its in ((model, optimizer), (other, resumed)):
                for tensor in masters(each, its.chained_optimizers[0]):
                    print(hashlib.sha256(tensor.numpy().tobytes()).hexdigest())


@BOTH
def test_a_skipped_step_changes_nothing_and_frozen_parameters_stay(distributed: bool) -> None:
    options = {"loss_scale": 1024.0, "frozen": True}
    with one_rank(fused_adamw=True):
        model, optimizer, inner = built(distributed, **options)
        log = [one_step(model, optimizer, i, optimizer.get_loss_scale()) for i in range(3)]
        expected = masters(model, inner)
    assert [successful for successful, *_ in log] == [True, False, True]
    with one_rank(fused_adamw=True, shared_weights=True):
        ours, optimizer, inner = built(distributed, **options)
        start = [p.detach().clone() for p in ours.parameters()]
        for i in range(3):
            before = [p.detach().clone() for p in ours.parameters()]
            assert one_step(ours, optimizer, i, optimizer.get_loss_scale()) == log[i]
            if not log[i][0]:
                assert all(map(torch.equal, before, ours.parameters()))
        assert all(map(torch.equal, masters(ours, inner), expected))
    for p, q, was in zip(ours.parameters(), model.parameters(), start, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, was) is not p.requires_grad


@BOTH
def test_weights_from_elsewhere_are_the_masters_then(distributed: bool) -> None:
    def run(inner: Any, model: Any, optimizer: Any) -> list[Tensor]:
        one_step(model, optimizer, 0)
        for p in model.parameters():
            p.data.mul_(1.5)
        optimizer.reload_model_params()
        one_step(model, optimizer, 1)
        return masters(model, inner)

    with one_rank(fused_adamw=True):
        model, optimizer, inner = built(distributed)
        expected = run(inner, model, optimizer)
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, inner = built(distributed)
        assert all(map(torch.equal, run(inner, model, optimizer), expected))


@BOTH
def test_upstreams_offloading_takes_the_states_alone(distributed: bool, monkeypatch: Any) -> None:
    """Its loop over parameters would leave the model without weights, and steps would go to copies."""
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, inner = built(distributed)
        plain = [one_step(model, optimizer, i) for i in range(2)], masters(model, inner)
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, inner = built(distributed)
        log, weights = [one_step(model, optimizer, 0)], [p.data_ptr() for p in model.parameters()]
        asked: list[Tensor] = []
        monkeypatch.setattr(Tensor, "cpu", lambda x: asked.append(x) or x.clone())
        optimizer.offload_to_cpu()
        monkeypatch.undo()
        assert {x.data_ptr() for x in asked}.isdisjoint(weights)
        kept = {id(x) for state in inner.optimizer.state.values() for x in state.values()}
        assert asked
        assert kept.isdisjoint(map(id, asked)), "states are where `cpu()` has put them"
        optimizer.restore_from_cpu()
        log.append(one_step(model, optimizer, 1))
        assert [p.data_ptr() for p in model.parameters()] == weights
        assert log == plain[0]
        assert all(map(torch.equal, masters(model, inner), plain[1]))


@BOTH
def test_weights_are_weights_at_every_moment_of_a_step(distributed: bool) -> None:
    """What reads weights or moments between two parts of a step (logging, an average) reads numbers."""
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, inner = built(distributed)
        one_step(model, optimizer, 0)
        for p in model.parameters():
            p.main_grad.zero_()  # an expert without tokens
        before = [p.detach().clone() for p in model.parameters()]
        assert not inner.prepare_grads()
        assert all(map(torch.equal, before, model.parameters()))
        inner.clip_grad_norm(1.0)
        assert all(map(torch.equal, before, model.parameters()))
        inner.step_with_ready_grads()
        found = zip(model.parameters(), masters(model, inner), strict=True)
        assert all(torch.equal(p.detach(), master.bfloat16()) for p, master in found)
        assert all((v >= 0).all() for v in moments(inner)[1::2])


def test_an_empty_parameter_does_not_end_the_loop() -> None:
    from accel.patches.shared_weights_optimizer import SharedWeightsOptimizer

    with one_rank(fused_adamw=True, shared_weights=True):
        _, _, inner = built(False)
        params = [torch.ones(n, dtype=torch.bfloat16, requires_grad=True) for n in (4, 0, 4)]
        for p in params:
            p.main_grad = torch.ones(p.shape)
        adam = PrecisionAwareAdam(
            params, lr=0.5, store_param_remainders=True, use_decoupled_grad=True
        )
        optimizer = SharedWeightsOptimizer(adam, inner.config, None, inner.init_state_fn)
        assert optimizer.step()[0]
        assert [p.tolist() for p in params] == [[0.5] * 4, [], [0.5] * 4]
        wrong = torch.ones(2, dtype=torch.float16, requires_grad=True)
        with pytest.raises(ValueError, match=r"a parameter \[2\] is torch.float16"):
            SharedWeightsOptimizer(
                PrecisionAwareAdam([wrong]), inner.config, None, inner.init_state_fn
            )


@BOTH
def test_the_learning_rate_may_come_later(
    distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HYPER, "lr", None)
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, _ = built(distributed)
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        before = [p.detach().clone() for p in model.parameters()]
        assert one_step(model, optimizer, 0)[0]
        assert not any(map(torch.equal, before, model.parameters()))


def test_gradients_reduced_in_bf16_are_clipped_in_fp32() -> None:
    from accel.patches._inner_masters import in_the_dtype_of_main_grads

    """By the step as it reads them; where upstream's clipping would write them, they are widened before."""
    for fused in (True, False):
        with one_rank(fused_adamw=fused, shared_weights=True):
            model, optimizer, inner = built(True)
            one_step(model, optimizer, 0)
            params = inner.get_parameters()

            def copy_(self: Any, params: list[Any] = params) -> None:
                for p in params:
                    p.decoupled_grad = torch.ones_like(p)

            def dtypes(inner: Any = inner, params: list[Any] = params) -> set[torch.dtype]:
                in_the_dtype_of_main_grads(copy_)(inner)
                return {p.decoupled_grad.dtype for p in params}

            assert dtypes() == {torch.bfloat16 if fused else torch.float32}
            params[0].grad_norm_group = "mtp"  # has a norm of its own, and is clipped by writing
            assert dtypes() == {torch.float32}
            del params[0].grad_norm_group
            assert dtypes() == {torch.bfloat16 if fused else torch.float32}
            inner.config.main_grads_dtype = torch.bfloat16
            assert dtypes() == {torch.bfloat16}


def test_state_dicts_of_the_plain_optimizer_are_stocks_both_ways() -> None:
    with one_rank(fused_adamw=True):
        model, optimizer, inner = built(False)
        for step in range(3):
            one_step(model, optimizer, step)
        stock = copy.deepcopy(optimizer.state_dict())
        weights = [p.detach().clone() for p in model.parameters()]
        one_step(model, optimizer, 3)
        expected = masters(model, inner)
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, inner = built(False)
        for step in range(3):
            one_step(model, optimizer, step)
        ours = copy.deepcopy(optimizer.state_dict())
        model, optimizer, inner = built(False)
        load(model, optimizer, weights, stock)
        one_step(model, optimizer, 3)
        assert all(map(torch.equal, masters(model, inner), expected))
    assert_same(ours, stock)
    with one_rank(fused_adamw=True):
        model, optimizer, inner = built(False)
        load(model, optimizer, weights, ours)
        one_step(model, optimizer, 3)
        assert all(map(torch.equal, masters(model, inner), expected))


def load(model: Any, optimizer: Any, weights: list[Tensor], state_dict: Any) -> None:
    for p, weight in zip(model.parameters(), weights, strict=True):
        p.data.copy_(weight)
    optimizer.load_state_dict(copy.deepcopy(state_dict))


def assert_same(ours: Any, theirs: Any) -> None:
    """The same keys, and tensors of the same bits."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
    elif isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


def test_a_state_dict_of_other_parameters_names_what_differs_and_loads_nothing() -> None:
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, inner = built(False)
        one_step(model, optimizer, 0)
        whole = copy.deepcopy(optimizer.state_dict())
        before = masters(model, inner), copy.deepcopy(moments(inner))
        wrong: dict[str, Any] = {}
        for name in ("shape", "group", "number", "moment"):
            wrong[name] = copy.deepcopy(whole)
        main = "fp32_from_fp16_params"
        wrong["shape"][main][0][1] = torch.zeros(7)
        wrong["group"][main].pop()
        wrong["number"][main][0].pop()
        wrong["moment"]["optimizer"]["state"][1]["exp_avg"] = torch.zeros(3)
        texts = {
            "shape": r"of group 0: number 1 is \[7\], the model's parameter \[33, 70\]",
            "group": "are in 1 groups, the model's parameters in 2",
            "number": "of group 0 are 1, the model's parameters 2",
            "moment": r"exp_avg of parameter 1, \[33, 70\], is kept as torch.float32.* of \[3\]",
        }
        for name, text in texts.items():
            with pytest.raises(ValueError, match=text):
                optimizer.load_state_dict(wrong[name])
            assert all(map(torch.equal, masters(model, inner), before[0])), name
            assert all(map(torch.equal, moments(inner), before[1])), name


@BOTH
@pytest.mark.parametrize("feature", ["shared_weights", "host_optimizer"])
def test_a_norm_that_nobody_has_read_clips_in_the_step(
    distributed: bool, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine's, a tensor: no gradient is written."""
    from megatron.core.optimizer import clip_grads

    found = []
    for impl in (None, pytest.fail):
        with one_rank(fused_adamw=True, **{feature: True}):
            monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", impl)
            model, optimizer, inner = built(distributed)
            log = [one_step(model, optimizer, i) for i in range(3)]
            assert all(isinstance(norm, Tensor) is (impl is not None) for _, norm, _ in log)
            norms = [float(norm) for _, norm, _ in log]
            assert min(norms) > 1, "clipping has something to do"
            found.append((norms, masters(model, inner)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for plain, unread in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(unread, plain, rtol=1e-6, atol=1e-8)


@BOTH
def test_states_move_from_a_parameter_to_another(distributed: bool) -> None:
    """As `expert_migration` moves them: the master, both moments, and the weight with its remainder."""
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, inner = built(distributed)
        bias, norm = model.module[0].bias, model.module[1].weight  # of the same shape
        before = ParamStates([model], optimizer).whole(bias)
        assert torch.equal(before[0], bias.detach().float())
        assert not before[1:].any(), "no step was taken"
        one_step(model, optimizer, 0)
        states = ParamStates([model], optimizer)
        taken = states.whole(norm)
        states.put(bias, taken)
        states.publish()
        assert torch.equal(states.whole(bias), taken)
        assert torch.equal(bias.detach(), taken[0].bfloat16())
        assert taken[1:].all()
        names = [name for name, _ in model.named_parameters()]
        named = dict(zip(names, masters(model, inner), strict=True))
        assert torch.equal(named["module.0.bias"], named["module.1.weight"])


@BOTH
def test_parameters_can_be_pickled(distributed: bool) -> None:
    """As by programs that save some of them, or send them to another process."""
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, _ = built(distributed)
        for param in model.parameters():
            assert torch.equal(pickle.loads(pickle.dumps(param)), param)
        assert pickle.dumps(optimizer.param_groups)


@BOTH
def test_weights_that_a_program_sets_to_zero_train_on(distributed: bool) -> None:
    """It tells nobody, as one that prunes."""
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, inner = built(distributed)
        one_step(model, optimizer, 0)
        for weight in trained(model):
            weight.data.mul_(0)
        assert all(master.isfinite().all() for master in masters(model, inner))
        one_step(model, optimizer, 1)
        for weight, master in zip(trained(model), masters(model, inner), strict=True):
            assert master.isfinite().all()
            assert torch.equal(weight, master.bfloat16())


@BOTH
def test_a_weight_and_its_master_take_4_bytes(distributed: bool) -> None:
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, inner = built(distributed)
        one_step(model, optimizer, 0)
        numel = sum(p.numel() for p in model.parameters())
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        kept = [s["master_param"] for s in inner.optimizer.state.values()]
        assert weights + sum(m.numel() * m.element_size() for m in kept) == 4 * numel
        fp32 = [
            p for g in inner.optimizer.param_groups for p in g["params"] if p.element_size() == 4
        ]
        assert not fp32


def test_a_load_makes_no_second_states() -> None:
    """Upstream's `load_state_dict` would hand in some for those that are not there yet."""
    with one_rank(fused_adamw=True, shared_weights=True):
        model, _, inner = built(True)
        numel = sum(p.numel() for p in model.parameters())
        saved = inner.state_dict()
        before = memory.memory_allocated()
        with memory.limit(before + 11 * numel):  # 10 are the states
            inner.load_state_dict(saved)
        assert 10 * numel <= memory.memory_allocated() - before < 11 * numel


@contextmanager
def one_at_a_time() -> Iterator[list[Any]]:
    """Masters that are joined; each is gone when the next one is."""
    joined: list[Any] = []
    join = PrecisionAwareAdam.master_of

    def master_of(self: Any, param: Tensor) -> Tensor:
        assert all(made() is None for made in joined)
        master = join(self, param)
        joined.append(weakref.ref(master))
        return master

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrecisionAwareAdam, "master_of", master_of)
        yield joined


def check_norm_of_weights() -> None:
    from megatron.training import global_vars, utils

    for distributed in (False, True):
        with one_rank(fused_adamw=True, shared_weights=True):
            model, optimizer, inner = built(distributed)
            weights = list(model.parameters())
            rounded = torch.cat([p.detach().double().view(-1) for p in weights]).norm().item()
            one_step(model, optimizer, 0)
            exact = torch.cat([m.double().view(-1) for m in masters(model, inner)]).norm().item()
            global_vars.set_args(SimpleNamespace(bf16=True, use_megatron_fsdp=False))
            try:
                with one_at_a_time() as joined:
                    found = utils.calc_params_l2_norm(model)
                assert len(joined) == len(weights)
                fresh, *_ = built(distributed)
                assert utils.calc_params_l2_norm(fresh) == pytest.approx(rounded, rel=1e-6)
            finally:
                global_vars.unset_global_variables()
            assert found == pytest.approx(exact, rel=1e-6)
            assert abs(exact - rounded) > 1e-5 * exact
            assert not any(hasattr(p, "main_param") for p in weights)


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_the_norm_is_that_of_the_masters_one_by_one(version: str) -> None:
    run_on(version, check_norm_of_weights)


@BOTH
def test_a_checkpoint_has_its_masters_on_the_host(distributed: bool) -> None:
    with one_rank(fused_adamw=True, shared_weights=True):
        model, optimizer, inner = built(distributed)
        one_step(model, optimizer, 0)
        numel = sum(p.numel() for p in model.parameters())
        with memory.limit(memory.memory_allocated() + numel):  # a byte for each would fit
            if distributed:
                params = [p for group in inner.model_float16_groups for p in group]
                told = [inner._get_main_param_and_optimizer_states(p)["param"] for p in params]
            else:
                told = [m for g in optimizer.state_dict()["fp32_from_fp16_params"] for m in g]
        assert sum(m.nbytes for m in told) == 4 * numel
        assert all(map(memory.is_pinned, told))


ARGS = {"bf16": True, "fp16": False, "optimizer": "adam", "use_precision_aware_optimizer": False}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bf16": False}, "parameters are fp32"),
    ({"bf16": False, "fp16": True}, "parameters are fp16"),
    ({"optimizer": "muon"}, "--optimizer muon is not served, only adam"),
    ({"use_megatron_fsdp": True}, "--use-megatron-fsdp: it writes"),
    ({"fp8_param_gather": True}, "--fp8-param-gather: its weights are fp8"),
    ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload: it writes"),
    (
        {"rl_offload_optimizer_during_inference": True},
        "--rl-offload-optimizer-during-inference: it takes",
    ),
]
"""What no optimizer serves whose inner one keeps the masters."""


@pytest.mark.parametrize(("changed", "text"), REFUSED)
def test_what_cannot_share_is_refused_by_name(changed: dict[str, Any], text: str) -> None:
    features = [shared_weights.FEATURE]
    context = Context("cpu", "0.19.2", SimpleNamespace(**{**ARGS, **changed}))
    with pytest.raises(ValueError, match=f"^--accel-shared-weights.*{text}"):
        choose(features, "off", {"shared_weights": True}, context)
    (choice,) = choose(features, "fast", {}, context, strict=True)
    assert choice.state == "idle"
    assert text in choice.reason
    (choice,) = choose(features, "fast", {}, Context("cpu", "0.19.2", SimpleNamespace(**ARGS)))
    assert choice.state == "active"


@pytest.mark.parametrize("feature", ["shared_weights", "host_optimizer"])
@pytest.mark.parametrize("by_flag", [False, True])
@pytest.mark.parametrize("option", ["qk_clip", "fp8_param_gather", "use_torch_fsdp2"])
def test_options_that_are_no_optimizers_are_asked_of_their_owners(
    option: str,
    by_flag: bool,
    feature: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A program without a command line has them in the model's configuration or the wrapper's, or shards."""
    from accel.patches import _inner_masters

    monkeypatch.setitem(_inner_masters.WANTED, feature, True)
    owner = "config" if option == "qk_clip" else "ddp_config"
    ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    param = torch.zeros(1)
    chunk = SimpleNamespace(
        config=SimpleNamespace(), ddp_config=ddp_config, parameters=lambda: [param]
    )
    if option == "use_torch_fsdp2":
        param._local_tensor = param  # as a DTensor has it
    else:
        setattr(getattr(chunk, owner), option, True)
    asked = ARGS | {"use_precision_aware_optimizer": by_flag, "optimizer_cpu_offload": False}
    config = SimpleNamespace(**asked)
    given = []
    namespace = {"USING_PYTORCH_OPTIMIZER": True, "Adam": torch.optim.AdamW, "given": given}
    exec("def build(config, chunks):\n    given.append(config)", namespace)
    build = _inner_masters.built(namespace["build"])
    if feature == "host_optimizer":
        with pytest.raises(ValueError, match=f"--accel-host-optimizer and {option}: it"):
            build(config, [chunk])
        return
    build(config, [chunk])
    assert f"shared_weights: this optimizer keeps its own masters: {option}: it" in caplog.text
    assert given == [config]
    assert vars(config) == asked


@BOTH
def test_a_configuration_stays_the_programs(distributed: bool) -> None:
    """As it was when it is read, copied or written down; the optimizer sees what is changed in it later."""
    from megatron.core.optimizer import OptimizerConfig

    with one_rank():
        plain = OptimizerConfig(optimizer="adam", bf16=True, use_distributed_optimizer=distributed)
    with one_rank(fused_adamw=True, shared_weights=True):
        config = OptimizerConfig(optimizer="adam", bf16=True, use_distributed_optimizer=distributed)
        assert asdict(config) == asdict(plain)
        assert asdict(replace(config)) == asdict(plain)
        _, _, inner = built(distributed)
        assert isinstance(inner.config, OptimizerConfig)
        assert inner.config.use_precision_aware_optimizer
        assert not vars(inner.config)["use_precision_aware_optimizer"], "the program's own"
        twin = copy.deepcopy(inner.config)
        inner.config.clip_grad = 7.0
        assert (inner.config.clip_grad, twin.clip_grad) == (7.0, 1.0)
        assert twin.store_param_remainders
        assert twin.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def test_an_adam_of_the_programs_own_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As slime puts one into Megatron for the length of a call."""
    import megatron.core.optimizer as upstream

    class StatelessAdam(torch.optim.AdamW):
        def __init__(self, params: Any, *, adam_w_mode: bool, **options: Any) -> None:
            super().__init__(params, **options)

    monkeypatch.setattr(upstream, "Adam", StatelessAdam)
    monkeypatch.setattr(upstream, "USING_PYTORCH_OPTIMIZER", False)
    with one_rank(shared_weights=True):
        _, _, inner = built(False)
    assert type(inner.optimizer) is StatelessAdam
    assert f"Megatron was given {__name__}." in caplog.text


class Descent(torch.optim.SGD):
    """In place of Muon, whose package is not Megatron's."""

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(params, lr=lr)


def check_chains() -> None:
    """Megatron's Adam for what Muon does not step is stock's: its gradients are in the norm, and clipped."""
    from megatron.core import optimizer as of_megatron
    from megatron.core.optimizer import muon

    runs = []
    for wanted in ({}, {"shared_weights": True}, {"host_optimizer": True}):
        with one_rank(**wanted), pytest.MonkeyPatch.context() as patch:
            patch.setattr(muon, "HAVE_EMERGING_OPTIMIZERS", True, raising=False)
            get = of_megatron.get_megatron_optimizer
            if hasattr(of_megatron, "_EMERGING_OPTIMIZERS"):
                patch.setattr(of_megatron, "HAVE_EMERGING_OPTIMIZERS", True)
                patch.setattr(of_megatron._EMERGING_OPTIMIZERS["muon"], "optimizer_cls", Descent)
            else:  # 0.17
                patch.setattr(muon, "TensorParallelMuon", Descent)
                get = muon.get_megatron_muon_optimizer
            model, optimizer = build(bf16=True, optimizer="muon", get=get)
            kinds = [type(inner.optimizer) for inner in optimizer.chained_optimizers]
            assert kinds[0] is Descent
            assert not issubclass(kinds[1], PrecisionAwareAdam)
            steps = [one_step(model, optimizer, step) for step in range(3)]
            runs.append((steps, [p.detach().clone() for p in model.parameters()]))
    for steps, weights in runs[1:]:
        assert steps == runs[0][0]
        for ours, theirs in zip(weights, runs[0][1], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_the_adam_beside_muon_is_stocks(version: str) -> None:
    run_on(version, check_chains)


def check_main_params_of_a_checkpoint() -> None:
    """`--load-main-params-from-ckpt`: what a checkpoint has in fp32 and the model has rounded."""
    found = []
    for on in ({}, {"shared_weights": True}, {"host_optimizer": True}):
        with one_rank(fused_adamw=True, **on):
            model, optimizer, inner = built(distributed=True)
            draw = torch.Generator().manual_seed(1)
            named = model.module.named_parameters()
            saved = {name: torch.randn(p.shape, generator=draw) for name, p in named}
            model.load_state_dict(saved)
            optimizer.reload_model_params({"model": saved})
            given = masters(model, inner)
            assert all(map(torch.equal, given, saved.values()))
            one_step(model, optimizer, 0)
            found.append([*given, *masters(model, inner), *(p.detach() for p in trained(model))])
    for ours in found[1:]:
        assert all(map(torch.equal, ours, found[0]))


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_main_params_of_a_checkpoint_are_the_masters(version: str) -> None:
    run_on(version, check_main_params_of_a_checkpoint)


def test_an_fp32_optimizer_stays_as_it_is_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with (
        one_rank(fused_adamw=True, shared_weights=True),
        caplog.at_level(logging.INFO, "accel"),
    ):
        model, optimizer = build()
        assert "keeps its own masters: parameters are fp32" in caplog.text
        assert not isinstance(optimizer.chained_optimizers[0].optimizer, PrecisionAwareAdam)
        assert one_step(model, optimizer, 0)[0]


def test_a_step_count_by_group_is_loaded_without_adam_resume() -> None:
    """As stock has it beside Apex and Transformer Engine."""
    with one_rank(shared_weights=True, adam_resume=False):
        model, optimizer = build(bf16=True, use_distributed_optimizer=False)
        take_steps(model, optimizer, range(3))
        saved = optimizer.state_dict()
        inner = saved["optimizer"]
        for group in inner["param_groups"]:
            group["step"] = 3
        inner["state"] = {
            number: {name: value for name, value in state.items() if name != "step"}
            for number, state in inner["state"].items()
        }
        _, resumed = build(bf16=True, use_distributed_optimizer=False)
        resumed.load_state_dict(saved)
        states = resumed.chained_optimizers[0].optimizer.state.values()
    assert {state["step"].item() for state in states} == {3}
