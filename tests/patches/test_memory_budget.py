"""`--accel-memory-budget`: gradients of stock whatever is chosen, and the peak that was asked for."""

from __future__ import annotations

import functools
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.device.cpu import memory
from accel.feature import Context, choose, read_settings
from accel.memory.layer_costs import WHOLE
from accel.patches import FEATURES, memory_budget, recompute_activation, swap_attention
from accel.patches._layer_spans import PARTS, switch
from tests.ops.contract import needs_native

from .blocks import HIDDEN, TOKENS, block, gradients
from .test_fused_adamw import one_rank
from .test_mamba import hybrid
from .test_recompute_modules import BIASES, MOE

LAYERS = 4
TOLD_AT = 5
"""Iterations; the plan is made after the third."""
_GIB = 1 << 30
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "biases": ({}, BIASES),
    "moe": ({"num_experts": 4, "moe_grouped_gemm": True}, MOE),
}


def train(module: Any, iterations: int, expected: Any = None) -> None:
    """Two micro-batches in each iteration, whose gradients are compared with what is expected."""
    for iteration in range(iterations):
        with memory_budget.ON.value.watched():
            for number in range(2):
                seed = 10 * iteration + number
                found = gradients(module, seed, buffers=True)[0]
                assert expected is None or all(map(torch.equal, found, expected[seed]))
                del found


def peak_of(module: Any) -> int:
    gradients(module, 98, buffers=True)
    torch.cuda.reset_peak_memory_stats()
    before = memory.memory_allocated()
    gradients(module, 99, buffers=True)
    return torch.cuda.max_memory_allocated() - before


@functools.cache
def stock(kind: str) -> tuple[int, int, dict[int, list[torch.Tensor]]]:
    """Peaks with everything kept and with everything computed again, and gradients by seed."""
    spec, config = MODELS[kind]
    with one_rank():
        module = block(LAYERS, spec, **config)
        kept = peak_of(module)
        whole = {"recompute_granularity": "full", "recompute_method": "uniform"}
        module = block(LAYERS, spec, **config, **whole, recompute_num_layers=1)
        least = peak_of(module)
        seeds = [10 * iteration + number for iteration in range(TOLD_AT) for number in range(2)]
        return kept, least, {seed: gradients(module, seed)[0] for seed in seeds}


@needs_native
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("share", "link"),
    [(0.0, "slow"), (0.3, "slow"), (0.6, "slow"), (1.5, "slow"), (0.0, "fast"), (0.6, "fast")],
)
def test_the_peak_is_within_the_budget_and_gradients_are_stocks(
    kind: str,
    share: float,
    link: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budget: what everything computed again takes, and that share of what keeping all adds."""
    monkeypatch.setattr(swap_attention, "MIN_BYTES", TOKENS * HIDDEN * 4)
    if link == "fast":
        monkeypatch.setattr(swap_attention, "rate_of", lambda swap: 1e30)
    kept, least, expected = stock(kind)
    budget = int(least + (0.2 + share) * (kept - least))
    passes: list[Any] = []
    monkeypatch.setattr(memory_budget, "TOLD_AT", TOLD_AT)
    monkeypatch.setattr(memory_budget.Planner, "_compare", lambda _, found: passes.append(found))
    spec, config = MODELS[kind]
    with one_rank(memory_budget=1.0):
        module = block(LAYERS, spec, **config)
        gradients(module, buffers=True)
        gc.collect()  # the other models
        on = memory_budget.ON.value
        on.budget += memory.memory_allocated() + budget - _GIB
        train(module, TOLD_AT, expected)
        plan = on.plan
    assert plan is not None
    names = {choice.name for choice in plan.choices}
    assert (names == {"keep"}) == (share > 1)
    assert any("swap" in name for name in names) == (link == "fast")
    assert "swap" not in plan.choices[-1].name
    assert (WHOLE in names) or share > 0 or link == "fast"
    layer = (kept - least) / (LAYERS - 1)
    assert passes[0].peak <= on.budget + 0.5 * layer  # temporaries of what is computed again
    assert passes[0].peak == pytest.approx(on.predicted[0], abs=0.8 * layer)
    told = capsys.readouterr().out
    assert "GiB if all is kept" in told
    assert "cannot be saved" not in told


@needs_native
@pytest.mark.parametrize("share", [0.2, 0.6, 1.2])
def test_mamba_layers_are_in_the_plan(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hybrid model; the budget: that share of what is between all computed again and all kept."""
    monkeypatch.setattr(memory_budget, "TOLD_AT", TOLD_AT)
    passes: list[Any] = []
    monkeypatch.setattr(memory_budget.Planner, "_compare", lambda _, found: passes.append(found))
    seeds = [10 * iteration + number for iteration in range(TOLD_AT) for number in range(2)]

    def stack(**config: Any) -> Any:
        return hybrid("MM*M-M", hidden_size=HIDDEN, **config).decoder

    with one_rank():
        module = stack()
        expected = {seed: gradients(module, seed)[0] for seed in seeds}
        kept = peak_of(module)
        whole = {"recompute_granularity": "full", "recompute_method": "uniform"}
        least = peak_of(stack(**whole, recompute_num_layers=1))
    with one_rank(memory_budget=1.0):
        module = stack()
        gradients(module, buffers=True)
        gc.collect()
        on = memory_budget.ON.value
        budget = int(least + share * (kept - least))
        on.budget += memory.memory_allocated() + budget - _GIB
        train(module, TOLD_AT, expected)
        plan = on.plan
    assert plan is not None
    pairs = zip(module.layers, plan.choices, strict=True)
    names = {type(layer).__name__ for layer, choice in pairs if choice.name != "keep"}
    assert ("MambaLayer" in names) == (share < 1) == bool(names)
    layer = (kept - least) / (len(module.layers) - 1)
    assert passes[0].peak <= on.budget + 0.6 * layer  # temporaries of what is computed again
    assert passes[0].peak == pytest.approx(on.predicted[0], abs=0.8 * layer)


@needs_native
def test_experts_are_measured_as_they_run() -> None:
    """Grouped: hooks on their linear layers, to measure them, would make them run one by one."""
    spec, config = MODELS["moe"]
    seeds = [10 * iteration + number for iteration in range(TOLD_AT) for number in range(2)]
    parts = []
    for grouped in (True, False):
        with one_rank(grouped_gemm=grouped):
            module = block(LAYERS, spec, **config)
            expected = {seed: gradients(module, seed)[0] for seed in seeds}
        with one_rank(grouped_gemm=grouped, memory_budget=1.0):
            module = block(LAYERS, spec, **config)
            train(module, TOLD_AT, expected)
            parts.append([m.costs.parts for m in memory_budget.ON.value.layers.values()])
    for layer, one_by_one in zip(*parts, strict=True):
        found = {part: num_bytes for part, (num_bytes, _) in layer.items()}
        assert found == pytest.approx({part: n for part, (n, _) in one_by_one.items()}, rel=0.01)


@needs_native
def test_what_an_earlier_plan_switched_on_is_off_again() -> None:
    with one_rank():
        expected = gradients(block(1), 5)[0]
    with one_rank(memory_budget=1.0):
        module = block(1)
        switch(module.layers[0], frozenset(PARTS))
        train(module, 3)
        layer = module.layers[0]
        assert not layer.self_attention.checkpoint_core_attention
        assert not getattr(layer.mlp, recompute_activation.MARK)
        assert all(map(torch.equal, gradients(module, 5)[0], expected))


@needs_native
def test_a_model_that_nobody_holds_is_let_go() -> None:
    with one_rank(memory_budget=1.0):
        module = block(2)
        train(module, 3)
        layers = [weakref.ref(layer) for layer in module.layers]
        assert len(memory_budget.ON.value.layers) == 2
        del module
        gc.collect()
        assert [layer() for layer in layers] == [None, None]


@needs_native
def test_a_budget_that_nothing_meets_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with one_rank(memory_budget=1e-6):
        module = block(2)
        train(module, 3)
        plan = memory_budget.ON.value.plan
    assert plan is not None
    assert [choice.name for choice in plan.choices] == [WHOLE, WHOLE]
    told = capsys.readouterr().out
    assert "cannot be saved: " in told
    assert "would" in told
    assert "iteration 10:" not in told


@needs_native
def test_prediction_and_measurement_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with one_rank(memory_budget=1.0):
        module = block(1)
        train(module, 11)
    assert capsys.readouterr().out.count("iteration 10: ") == 1


@needs_native
def test_evaluation_and_a_graph_that_nobody_needs() -> None:
    with one_rank():
        expected = gradients(block(2), 5)[0]
    with one_rank(memory_budget=1.0):
        module = block(2)
        on = memory_budget.ON.value
        with torch.no_grad():
            module.eval()(torch.randn(8, 1, 64), None)
        module.train()
        with on.watched():
            module(torch.randn(8, 1, 64).requires_grad_(), None)
        assert [measured.outstanding for measured in on.layers.values()] == [1, 1]
        train(module, 3)
        assert [measured.in_flight for measured in on.layers.values()] == [1, 1]
        assert all(map(torch.equal, gradients(module, 5)[0], expected))


@needs_native
def test_frozen_layers_that_nothing_runs_backward() -> None:
    """Adapters in the last layer alone: the first has nothing to measure, and keeps nothing."""

    def step(module: Any) -> torch.Tensor:
        module.zero_grad()
        module(torch.ones(8, 1, 64), None).square().sum().backward()
        grad = module.layers[1].mlp.linear_fc1.weight.grad
        assert grad is not None
        return grad

    def frozen() -> Any:
        module = block(2, hidden_dropout=0.0, attention_dropout=0.0).requires_grad_(False)
        module.layers[1].mlp.linear_fc1.weight.requires_grad_()
        return module

    with one_rank():
        expected = step(frozen())
    with one_rank(memory_budget=1.0):
        module, on = frozen(), memory_budget.ON.value
        for _ in range(memory_budget.PATIENCE):
            assert on.plan is None
            with on.watched():
                assert torch.equal(step(module), expected)
        assert on.plan is not None
        assert [choice.name for choice in on.plan.choices] == ["keep", "keep"]
        assert torch.equal(step(module), expected)


@needs_native
def test_micro_batches_of_a_layer_without_a_backward_pass_are_not_in_flight(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(micro_batches: int) -> str:
        with one_rank(memory_budget=1.0):
            module = block(2, hidden_dropout=0.0, attention_dropout=0.0).requires_grad_(False)
            module.layers[1].mlp.linear_fc1.weight.requires_grad_()
            on = memory_budget.ON.value
            for _ in range(memory_budget.PATIENCE):
                with on.watched():
                    for _ in range(micro_batches):
                        module(torch.ones(8, 1, 64), None).square().sum().backward()
            assert on.plan is not None
            assert on.plan.choices[0].name == "keep"
            assert on.layers[module.layers[1]].costs is not None
            del module, on
        gc.collect()
        (line,) = [x for x in capsys.readouterr().out.splitlines() if "if all is kept" in x]
        return line.partition("asked, ")[2]

    assert told(64) == told(1)


@pytest.mark.parametrize("name", ["swap_attention", "memory_budget"])
def test_cuda_graphs_are_refused(name: str) -> None:
    feature = next(f for f in FEATURES if f.name == name)
    context = Context("cuda", "0.19.2", SimpleNamespace(cuda_graph_impl="local"))
    assert feature.refuses(context) == "not with --cuda-graph-impl local: use none"
    context.args.cuda_graph_scope = ["full_iteration_inference"]
    assert feature.refuses(context) is None
    del context.args.cuda_graph_scope
    context.args.cuda_graph_impl = "none"
    assert feature.refuses(context) is None


SPARSE = """
    multi_latent_attention qk_layernorm num_layers=2 hidden_size=64 ffn_hidden_size=64 num_attention_heads=4
    q_lora_rank=32 kv_lora_rank=32 qk_head_dim=16 qk_pos_emb_head_dim=16 v_head_dim=16
    dsa_indexer_n_heads=2 dsa_indexer_head_dim=32 dsa_indexer_topk=4
"""


def sparse(**config: Any) -> Any:
    """A GPT with DeepSeek's sparse attention."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec as spec_of,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    pairs = (word.partition("=") for word in SPARSE.split())
    sizes: dict[str, Any] = {name: int(value) if value else True for name, _, value in pairs}
    built = MLATransformerConfig(
        **sizes,
        experimental_attention_variant="dsa",
        dsa_indexer_loss_coeff=0.01,
        dsa_indexer_rotate_activation=False,
        normalization="RMSNorm",
        rope_type="rope",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        transformer_impl="transformer_engine",
        **config,
    )
    return GPTModel(built, spec_of(built), 96, 32, position_embedding_type="rope")


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.randint(96, (1, 32), generator=torch.Generator().manual_seed(0))
    return model(ids, torch.arange(32)[None], None, labels=ids.roll(-1, 1)).sum()


def test_the_loss_of_sparse_attentions_indexer_is_logged_once() -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper as Logged,
    )

    def run(**options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        with one_rank(**options):
            model = sparse()
            Logged.tracker.clear()
            loss_of(model).backward()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return Logged.tracker.pop("values").tolist(), gradients

    logged, expected = run()
    again, found = run(memory_budget=1.0)
    assert min(logged) > 0
    assert again == logged
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_shared_indices_of_sparse_attention_are_refused() -> None:
    """Stock's full recomputation takes those of the newest micro-batch, too."""
    message = "not with --dsa-indexer-topk-freq 2.*: use 1"
    context = Context("cpu", "0.19.2", SimpleNamespace(dsa_indexer_topk_freq=2))
    with pytest.raises(ValueError, match=message):
        choose([memory_budget.FEATURE], "off", {"memory_budget": 1.0}, context)
    with one_rank(memory_budget=1.0), pytest.raises(ValueError, match=message):
        loss_of(sparse(dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=1))


@pytest.mark.parametrize(
    ("short", "advice"),
    [(100, "--accel-shared-weights"), (1000, "--accel-host-optimizer"), (9999, "parallelism")],
)
def test_the_cheapest_thing_that_would_meet_it(
    short: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = SimpleNamespace(parameters=lambda: iter([torch.empty(100)]))
    layers = [(layer, memory_budget.Measured(None))]
    assert advice in memory_budget._advice(short, layers)
    monkeypatch.setitem(memory_budget.WANTED, "shared_weights", None)  # it is on already
    assert "--accel-shared-weights" not in memory_budget._advice(short, layers)


@pytest.mark.parametrize("value", ["much", "-1", "0", "inf", "nan", True])
def test_a_budget_that_is_none(value: Any) -> None:
    with pytest.raises(ValueError, match="is no budget"):
        memory_budget.parse_budget(value)


def test_it_wants_a_value() -> None:
    context = Context("cpu", "0.19.2", SimpleNamespace(recompute_granularity=None))
    asked = {"memory_budget": True}
    choices = choose([memory_budget.FEATURE], "off", asked, context)
    with pytest.raises(ValueError, match="GiB"):
        read_settings(choices, asked)


def test_other_recomputation_is_refused() -> None:
    context = Context("cpu", "0.19.2", SimpleNamespace(recompute_granularity="full"))
    with pytest.raises(ValueError, match="--recompute-granularity exclude each other"):
        choose([memory_budget.FEATURE], "off", {"memory_budget": 1.0}, context)


def test_the_step_is_found_by_name_and_by_place() -> None:
    def train_step(*args: Any, forward_backward_func: Any = None, **kwargs: Any) -> Any:
        return (forward_backward_func or args[6])(1, two=2)

    def passes(one: int, two: int) -> tuple[int, int]:
        return one, two

    wrapped = memory_budget.watching(train_step)
    with one_rank(memory_budget=1.0):
        assert wrapped(forward_backward_func=passes) == (1, 2)
        assert wrapped(*[None] * 6, passes) == (1, 2)
        assert memory_budget.ON.value.iteration == 2
