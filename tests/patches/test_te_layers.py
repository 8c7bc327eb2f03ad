"""What Megatron is told about Transformer Engine, which specs it gets, and what it asks of a checkpoint."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import accel
from accel.feature import Context
from accel.layers import stand_in
from accel.log import log_once
from accel.patches import te_layers
from accel.patches._te_execution import execute, import_with_layers, importing_layers
from accel.patches._te_remade import MOCKS_BY_VALUE
from accel.patches._te_versions import EXPERTS, EXTENSION, VERSIONS
from accel.patches.spec_checkpoints import as_saved, other_order, refuse_other_order
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import output_with

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="transformer_engine is installed",
)


@pytest.fixture
def enabled() -> Iterator[None]:
    accel.enable(preset="off", device="cpu")
    yield
    accel.disable()


def asked_by(module: str, version: str) -> bool:
    """`is_te_min_version(version)` as that module gets it."""
    namespace = {"__name__": module}
    exec("from megatron.core.utils import is_te_min_version", namespace)
    return eval(f"is_te_min_version({version!r})", namespace)


def test_each_gate_is_told_what_the_layers_can_do(enabled: None) -> None:
    for module, version in VERSIONS.items():
        assert asked_by(module, version)
        if module != EXPERTS:  # the operations of 2.14
            assert not asked_by(module, "2.10.0"), "split attention is refused"
    attention = "megatron.core.transformer.attention"
    assert asked_by(attention, "2.2.0"), "a causal mask in training with an inference context stays"
    assert not asked_by(attention, "2.6.0dev0"), "FP8"
    for module in ("megatron.core.fp8_utils", "megatron.core.optimizer"):
        assert not asked_by(module, "1.0.0")


def start(version: str = "0.19.2", **args: object) -> list[str]:
    args = {"transformer_impl": "transformer_engine", "bf16": True, **args}
    return te_layers.prepare(Context("cpu", version, SimpleNamespace(**args)))


def test_largest_logits_in_fp32_are_refused_at_the_start() -> None:
    asked = {"qk_clip": True, "log_max_attention_logit": True}
    message = "--qk-clip --log-max-attention-logit in fp32: .* give --bf16 or --fp16"
    with pytest.raises(ValueError, match=message):
        start(bf16=False, **asked)
    assert start(bf16=False, fp16=True, **asked) == []
    assert start(bf16=False, softmax_type="learnable") == []


def test_validation_is_told_before_any_feature_is_on() -> None:
    def told() -> bool:
        return asked_by("megatron.training.arguments", "2.9.0")

    for impl, expected in (("transformer_engine", True), ("local", False)):
        context = Context("cpu", "0.19.2", argparse.Namespace(transformer_impl=impl))
        with te_layers.told_while_validating(context):
            assert told() is expected
        assert not told()


def test_a_layer_that_recomputes_its_output_asks_for_fp8_and_is_told_no(enabled: None) -> None:
    """Upstream takes `fp8=False` for FP8, and reads a name that only Transformer Engine binds."""
    from megatron.core.tensor_parallel import random

    random.initialize_rng_tracker()
    x = torch.randn(4, requires_grad=True)
    layer = random.CheckpointWithoutOutput(fp8=False)
    y = layer.checkpoint(torch.sigmoid, x)
    product = y * 3
    layer.discard_output_and_register_recompute(product)
    product.sum().backward()
    expected = torch.sigmoid(x.detach())
    torch.testing.assert_close(x.grad, 3 * expected * (1 - expected))


@pytest.mark.parametrize("options", [{}, {"align_size": 256}])
def test_experts_in_fp8_are_one_line(options: dict[str, int], enabled: None) -> None:
    """Of a model that is built without the command line, which says so first."""
    from megatron.core.transformer.moe import experts

    for name in ("Fp8Padding", "Fp8Unpadding"):
        with pytest.raises(NotImplementedError, match="FP8 and FP4 need Transformer Engine"):
            getattr(experts, name)(4, **options)


@pytest.mark.parametrize("asked", [{"fp8": "hybrid"}, {"fp4": "e2m1", "fp4_recipe": "nvfp4"}])
def test_layers_refuse_fp8_and_fp4_of_their_config(asked: dict[str, str], enabled: None) -> None:
    """A model that is built without a command line."""
    from megatron.core.extensions.transformer_engine import TELinear, TENorm

    config = config_of(**asked)
    options = dict.fromkeys(("bias", "skip_bias_add", "skip_weight_param_allocation"), False)
    with pytest.raises(ValueError, match="FP8 and FP4 need Transformer Engine"):
        TELinear(8, 8, parallel_mode=None, config=config, init_method=None, **options)
    with pytest.raises(ValueError, match=f"{next(iter(asked))}=.*: FP8 and FP4 need"):
        TENorm(config, 8)


def config_of(**options: object) -> object:
    from megatron.core.transformer import TransformerConfig

    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    return TransformerConfig(**shape, use_cpu_initialization=True, **options)


def test_masks_of_t5_are_rows_of_keys(enabled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention that Megatron's own arguments ask for; an assertion of 1.7 stops it otherwise."""
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset

    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    tokens, mask = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5)
    config_attention_mask = T5MaskedWordPieceDataset.config_attention_mask
    encoder, decoder, cross = config_attention_mask(tokens, tokens, mask, mask)
    assert decoder is None
    assert [m.shape for m in (encoder, *cross)] == [(2, 1, 1, 5)] * 3


def test_modelopts_norm_is_ours_and_disable_takes_it_back() -> None:
    accel.enable(preset="off", device="cpu")
    try:
        layers = importlib.import_module(te_layers.MODELOPT)
        specs = importlib.import_module("megatron.core.post_training.modelopt.gpt.model_specs")
        mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
        for kind in (stand_in.LayerNorm, stand_in.RMSNorm):
            norm = layers.Norm(config_of(normalization=kind.__name__), hidden_size=8)
            assert type(norm) is kind
            assert "_extra_state" not in norm.state_dict()
            norm.load_state_dict(norm.state_dict())
        assert mla.Linear is layers.Linear
    finally:
        accel.disable()
    assert mla.Linear is layers._get_extra_te_kwargs is layers.te is None
    assert isinstance(layers.Linear, type)
    assert specs.Norm is layers.Norm
    assert layers.HAVE_TE is False


def test_the_tokens_of_a_pack_that_a_rank_holds(enabled: None) -> None:
    from megatron.core import utils

    starts = torch.tensor([0, 8, 12], dtype=torch.int32)
    held = [utils.tex.thd_get_partitioned_indices(starts, 12, 2, rank).tolist() for rank in (0, 1)]
    assert held == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_nobody_else_finds_the_package(enabled: None) -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    assert gpt_layer_specs.HAVE_TE is True
    assert importlib.util.find_spec("transformer_engine") is None
    assert not [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine")


def test_a_package_that_is_there_after_all_is_what_is_imported(
    enabled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron's own tests of the op fuser put one there, without an operation of the real one's."""
    name = "transformer_engine.pytorch.ops"

    def find() -> object:
        from transformer_engine.pytorch.ops import ScaledSwiGLU

        return ScaledSwiGLU

    find = importing_layers(find)
    assert find() is import_with_layers(name, fromlist=("ScaledSwiGLU",)).ScaledSwiGLU
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        package = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    with pytest.raises(ImportError, match="ScaledSwiGLU"):
        find()


def test_the_spec_provider_gives_our_layers_and_disable_takes_them_back() -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    accel.enable(preset="off", device="cpu")
    try:
        from accel.layers.attention import DotProductAttention
        from accel.layers.grouped_linear import GroupedLinear
        from accel.layers.linear import LayerNormLinear, Linear

        provider = gpt_layer_specs.TESpecProvider()
        assert issubclass(provider.column_parallel_layer_norm_linear(), LayerNormLinear)
        assert issubclass(provider.row_parallel_linear(), Linear)
        assert issubclass(provider.core_attention(), DotProductAttention)
        experts = provider.grouped_mlp_modules(True)
        assert issubclass(experts.keywords["submodules"].linear_fc1, GroupedLinear)
    finally:
        accel.disable()
    assert gpt_layer_specs.TESpecProvider is None


def test_what_the_wrappers_copied_from_megatron_is_patched_with_it() -> None:
    from megatron.core.tensor_parallel import layers

    before = layers._initialize_affine_weight_cpu
    accel.enable(preset="off", device="cpu")
    try:
        executed = execute(EXTENSION)
        assert layers._initialize_affine_weight_cpu is not before, "cpu_initialization wraps it"
        assert executed._initialize_affine_weight_cpu is layers._initialize_affine_weight_cpu
    finally:
        accel.disable()
    assert executed._initialize_affine_weight_cpu is before


def hybrid_specs() -> tuple[types.ModuleType, str]:
    """The module of hybrid models' specs and its default; megatron-core 0.17 calls them Mamba models."""
    for name, spec in zip(MOCKS_BY_VALUE, ("hybrid_stack_spec", "mamba_stack_spec"), strict=False):
        if importlib.util.find_spec(name.rpartition(".")[0]) is not None:
            return importlib.import_module(name), spec
    raise AssertionError


def test_specs_that_hold_classes_by_value_are_made_again_and_brought_back() -> None:
    accel.enable(preset="off", device="cpu", te_layers=False)
    try:
        specs, name = hybrid_specs()
        before = getattr(specs, name)
        accel.enable(preset="off", device="cpu")
        from accel.layers.linear import Linear

        layer = getattr(specs, name).submodules.attention_layer
        assert issubclass(layer.submodules.self_attention.submodules.linear_proj, Linear)
    finally:
        accel.disable()
    assert getattr(specs, name) is before


def test_copies_of_these_specs_are_replaced_and_brought_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron's builder of hybrid models copies the default spec where it is imported, before any feature is
    on; and ModelOpt's spec is made of it."""
    accel.enable(preset="off", device="cpu", te_layers=False)
    try:
        importlib.import_module("megatron.training")
        specs, name = hybrid_specs()
        copy = types.ModuleType("megatron.copies_a_spec")
        monkeypatch.setitem(sys.modules, copy.__name__, copy)
        copy.mine = before = getattr(specs, name)
        held = holders(before)
        accel.enable(preset="off", device="cpu")
        made = getattr(specs, name)
        assert made is not before
        assert copy.mine is made
        assert holders(made) == held
        assert not holders(before)
        if modelopt := sys.modules.get(MOCKS_BY_VALUE[2]):
            layers = modelopt.hybrid_stack_spec_no_moe_grouped_gemm.submodules
            assert layers.mamba_layer is made.submodules.mamba_layer
    finally:
        accel.disable()
    assert copy.mine is before
    assert holders(before) == held


def holders(spec: object) -> set[tuple[str, str]]:
    """Module and name of each that is bound to it."""
    return {
        (module.__name__, name)
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType) and module.__name__.startswith("megatron")
        for name, value in vars(module).items()
        if value is spec
    }


@dataclass
class Sharded:
    """As much of Megatron's ShardedTensor and ShardedObject as is looked at."""

    key: str

    @property
    def unique_key(self) -> str:
        return f"{self.key}/shard_0_1"


LOCAL, TE = "layers.mlp.linear_fc1.layer_norm_weight", "layers.pre_mlp_layernorm.weight"


@pytest.mark.parametrize(("asked", "saved"), [(LOCAL, TE), (TE, LOCAL)])
def test_the_norm_before_experts_is_found_under_either_name(asked: str, saved: str) -> None:
    tree = {"model": {"w": Sharded(asked)}, "optimizer": [Sharded(f"state.exp_avg.{asked}")]}
    found = as_saved(tree, {saved, f"state.exp_avg.{saved}"})
    assert found["model"]["w"].key == saved
    assert found["optimizer"][0].key == f"state.exp_avg.{saved}"
    assert tree["model"]["w"].key == asked, "the caller's own is left alone"
    assert as_saved(tree, {asked, saved, f"state.exp_avg.{asked}"})["model"]["w"].key == asked


def test_only_a_missing_extra_state_is_left_out() -> None:
    tree = {
        "a": Sharded("a._extra_state"),
        "b": Sharded("b._extra_state"),
        "c": Sharded("c"),
        "d": 1,
    }
    found = as_saved(tree, {"a._extra_state/shard_0_1"})
    assert list(found) == ["a", "c", "d"], "a missing weight is upstream's error"


def run(**changes: object) -> SimpleNamespace:
    plain = {"use_distributed_optimizer": True, "no_load_optim": None, "finetune": False}
    return SimpleNamespace(**plain, **{"transformer_impl": "local", **changes})


def test_an_order_that_differs_is_refused_and_the_way_out_works() -> None:
    te = {"transformer_impl": "transformer_engine"}
    problem = other_order(run(), run(**te))
    assert problem is not None
    assert "--dist-ckpt-optim-fully-reshardable" in problem
    assert other_order(run(), run()) is None
    assert other_order(run(dist_ckpt_optim_fully_reshardable=True), run(**te)) is None
    without_optimizer = run(**te)
    without_optimizer.no_load_optim = True
    assert other_order(run(), without_optimizer) is None


def test_the_arguments_are_those_that_upstreams_module_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program may hand the module its own, with none in Megatron's globals."""
    from megatron.training import checkpointing

    check = refuse_other_order(lambda saved: "checked")
    monkeypatch.setattr(checkpointing, "get_args", run)
    assert check(run()) == "checked"
    with pytest.raises(ValueError, match="--dist-ckpt-optim-fully-reshardable"):
        check(run(transformer_impl="transformer_engine"))


def test_modules_of_a_program_that_hold_no_layers_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code = """
try:
    import transformer_engine
except ImportError:
    HAVE_TE, TELinear, TENorm = False, None, None
"""
    for name in ("my_layer_specs", "megatron.of_theirs"):
        module = types.ModuleType(name)
        exec(code, vars(module))
        monkeypatch.setitem(sys.modules, name, module)
    other = types.ModuleType("asks_for_itself")
    other.HAVE_TE = False
    monkeypatch.setitem(sys.modules, other.__name__, other)
    assert te_layers.asked_before() == ["my_layer_specs"]
    log_once.cache_clear()
    accel.enable(preset="off", device="cpu")
    accel.disable()
    (line,) = (r.getMessage() for r in caplog.records if "HAVE_TE is False" in r.getMessage())
    assert line.startswith("te_layers: my_layer_specs: ")


def check_berts_spec() -> None:
    accel.enable(preset="off", device="cpu", te_layers=False)
    from megatron.core.models.bert.bert_layer_specs import bert_layer_with_transformer_engine_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.training import arguments  # whose import hooks Megatron

    spec = bert_layer_with_transformer_engine_spec
    assert arguments is not None
    assert isinstance(spec, ModuleSpec)
    for name in ("module", "submodules", "params", "metainfo"):
        with pytest.raises(ImportError, match="leave out --transformer-impl local, or give --spec"):
            getattr(spec, name)
    accel.enable(preset="off", device="cpu")
    from megatron.core.models.bert import bert_layer_specs

    whole = bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    assert type(spec) is ModuleSpec
    assert spec.module is whole.module
    assert spec.submodules.self_attention == whole.submodules.self_attention
    assert spec.submodules.self_attention.submodules.core_attention is not None
    accel.disable()
    with pytest.raises(ImportError, match="te_layers is not active"):
        assert spec.module
    with pytest.raises(ImportError, match="Please use local Bert layer spec"):
        assert bert_layer_specs.bert_layer_with_transformer_engine_spec


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_what_a_script_imports_for_bert_is_filled_when_the_feature_is_on(version: str) -> None:
    output_with(version, f"import {__name__} as test; test.check_berts_spec()")
