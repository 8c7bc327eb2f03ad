"""``--transformer-impl transformer_engine``, Megatron's default, where Transformer Engine is not installed.

Megatron's wrappers of Transformer Engine (``TELinear``, ``TENorm``, ``TEDotProductAttention``, ...) are
Megatron's own code: constructor arguments, process groups, sharded state dicts. Without the package they
derive from mocks. Here the same file of the Megatron at hand is executed once more, with an ``import`` of
its own that finds accel's layers under the names of Transformer Engine, and the resulting classes take the
place of the mocks wherever Megatron bound them or left ``None``. So arguments, attributes and checkpoints
are upstream's in every version, and ``import transformer_engine`` still fails for everybody else.

Weights and their keys are those of Transformer Engine: the norm before a linear layer is
``layer_norm_weight`` of that layer, and every layer has an ``_extra_state``, which is empty, may be missing
in what is loaded, and must not hold FP8 scales. The first weights of a dense model are those of the local
spec with the same seed, unless ``--softmax-type learnable`` draws for each layer, as Transformer Engine does;
weights of either spec load in the other, and so do states of optimizers but those that lie in the order of
the parameters (``spec_checkpoints``).

What Megatron asks the version of Transformer Engine for, and what it is told, module by module: 2.9 where
accel's layers serve what the gate guards (grouped linear layers 1.9, q/k norms 1.9, padding masks and context
parallelism 1.10, fused MLPs 1.13, delayed weight gradients 2.3 and 2.8, the softmax with an offset 2.8, the
largest attention logit 2.9); 2.14 in the grouped experts, whose operations for
``--use-transformer-engine-op-fuser`` are there; 0 where FP8 and FP4 tensors, CUDA graphs, userbuffers or an
optimizer of its own are decided. So Megatron itself refuses split attention (2.10), one parameter for all
experts (2.14) and the dense MLP as a group of one (2.14), which computes in FP8 only.

Context parallelism, for which stock needs Transformer Engine, is ``context_parallel``'s, which see.
For the largest logit scores are computed once more, a slice of queries at a time. Packed sequences have none:
flags that ask for both are an error.

Megatron's BERT script takes these layers whatever ``--transformer-impl`` says, unless ``--spec local`` is
given, and imports their spec before arguments are read: what it imports is filled when the feature is on.

FP8, FP4 and userbuffers are not there yet: asking for one, on the command line or in the config of a layer,
is an error that says so. The feature is idle under ``--transformer-impl local``.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from packaging.version import Version

from accel import patching
from accel.feature import Context, Feature
from accel.layers import stand_in
from accel.log import log_once
from accel.patches._told import told
from accel.patches.fused_attention import PACKING
from accel.patching import AUDIENCE, Patch, aliases
from accel.upstream import SUPPORTED_RANGE, flag_of, te_installed, te_serves

HAVE_TE = True

EXTENSION = "megatron.core.extensions.transformer_engine"
_UTILS = "megatron.core.utils"
_CORE = "megatron.core"
EXPERTS = f"{_CORE}.transformer.moe.experts"
MODELOPT = f"{_CORE}.post_training.modelopt.layers"
_ABSORBED_MLA = f"{_CORE}.transformer.experimental_attention_variant.absorbed_mla"
_MLA = f"{_CORE}.transformer.multi_latent_attention"

VERSIONS = {
    EXTENSION: "2.9.0",
    f"{EXTENSION}_spec_provider": "2.9.0",
    "megatron.core.models.gpt.gpt_layer_specs": "2.9.0",
    "megatron.core.models.bert.bert_model": "2.9.0",
    "megatron.core.models.backends": "2.9.0",
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": "2.9.0",
    "megatron.core.models.mimo.partition.utils": "2.9.0",
    "megatron.core.models.multimodal.llava_model": "2.9.0",
    "megatron.core.datasets.t5_dataset": "2.9.0",
    "megatron.core.ssm.mamba_context_parallel": "2.9.0",
    _UTILS: "2.9.0",  # itself, for packs under context parallelism in 0.17
    EXPERTS: "2.14.0",
    "megatron.core.transformer.attention": "2.2.0",  # its gates behind that are FP8's and FP4's
    "megatron.core.transformer.transformer_config": "2.9.0",
    "megatron.training.arguments": "2.9.0",
}
"""Module, or top-level package -> the version of Transformer Engine that it is told; others are told 0.
The router and permutation of 2.7 and 2.12 are the feature ``moe_fusion``, through other names."""

CLASSES = (
    "TEActivationOp",
    "TEColumnParallelGroupedLinear",
    "TEColumnParallelLinear",
    "TECudaRNGStatesTracker",
    "TEDelayedScaling",
    "TEDotProductAttention",
    "TEFusedMLP",
    "TEFusedMLPWithGroupedLinear",
    "TEFusedResidualRMSNorm",
    "TEGroupedLinear",
    "TELMHeadColumnParallelLinear",
    "TELayerNormColumnParallelLinear",
    "TELinear",
    "TENorm",
    "TERowParallelGroupedLinear",
    "TERowParallelLinear",
    "_get_extra_te_kwargs",
    "set_save_original_input",
    "split_te_layernorm_column_parallel_linear",
    "te_checkpoint",
)
"""What the extension defines; a Megatron that lacks one is not given it."""

GUARDED = {
    f"{_CORE}.extensions.transformer_engine_spec_provider": (
        "TEActivationOp",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
    ),
    f"{_CORE}.models.T5.t5_spec": (
        "TEColumnParallelLinear",
        "TEDotProductAttention",
        "TELayerNormColumnParallelLinear",
        "TENorm",
        "TERowParallelLinear",
    ),
    f"{_CORE}.models.backends": (
        "TEActivationOp",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
    ),
    f"{_CORE}.models.bert.bert_layer_specs": (
        "TEDotProductAttention",
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
    ),
    f"{_CORE}.models.gpt.gpt_layer_specs": (
        "TEFusedMLP",
        "TEFusedMLPWithGroupedLinear",
        "TENorm",
        "TESpecProvider",
    ),
    f"{_CORE}.models.gpt.heterogeneous.heterogeneous_layer_specs": (
        "TEDotProductAttention",
        "TELayerNormColumnParallelLinear",
        "TELayerNormColumnParallelLinearGathered",
        "TENorm",
        "TERowParallelLinear",
    ),
    f"{_CORE}.models.multimodal.llava_model": ("TEDotProductAttention",),
    MODELOPT: ("_get_extra_te_kwargs",),
    f"{_CORE}.transformer.attention": ("TELinear", "TENorm", "set_save_original_input"),
    _ABSORBED_MLA: (
        "TEColumnParallelLinear",
        "TELinear",
        "set_save_original_input",
    ),
    f"{_CORE}.transformer.moe.moe_layer": ("TELinear", "te_checkpoint"),
    f"{_CORE}.transformer.moe.shared_experts": ("TELinear", "set_save_original_input"),
    _MLA: (
        "TEColumnParallelLinear",
        "TELayerNormColumnParallelLinear",
        "TELinear",
        "set_save_original_input",
        "split_te_layernorm_column_parallel_linear",
    ),
    f"{_CORE}.transformer.multi_token_prediction": ("TESpecProvider",),
}
"""Module -> the names that it leaves ``None`` without Transformer Engine."""

UNBOUND = {
    f"{_CORE}.models.gpt.experimental_attention_variant_module_specs": (
        "accel.patches.te_extension:TESpecProvider",
    ),
    f"{_CORE}.tensor_parallel.random": (
        "accel.layers.stand_in:FP8GlobalStateManager",
        "accel.layers.stand_in:activation_recompute_forward",
        "accel.layers.stand_in:fp8_autocast",
    ),
}
"""Module -> what it gets under names that it does not bind at all without Transformer Engine. That of random
numbers reads them whenever a layer recomputes its output."""

PARTITION = (
    f"{_CORE}.models.mimo.partition.utils",
    f"{_CORE}.models.multimodal.llava_model",
    f"{_CORE}.ssm.mamba_context_parallel",
    f"{_CORE}.utils",
)
"""Modules that ask Transformer Engine's C++ half, as `tex`, which tokens of a pack a context-parallel rank
holds."""

_SINCE = "1.10.0"
"""The version of Transformer Engine that they want for it."""

MOCKS_BY_VALUE = (
    f"{_CORE}.models.hybrid.hybrid_layer_specs",
    f"{_CORE}.models.mamba.mamba_layer_specs",  # 0.17
    f"{_CORE}.post_training.modelopt.hybrid.model_specs",  # of the first's
    "megatron.training.activation_logging",  # the types of layers that it logs
    "megatron.training.dgrad_logging",
)
"""Modules that hold the mocks by value since they were imported, each behind those it takes from."""

_QUANTIZED = ("fp8", "fp4")
_UNQUANTIZED = (
    "FP8 and FP4 need Transformer Engine; accel's layers compute in fp32, bf16 and fp16 so far"
)

_OF_LOGITS = ("qk_clip", "log_max_attention_logit")

UNGUARDED = (f"{EXTENSION}_spec_provider", f"{_CORE}.models.backends")
"""Those that copied ``None`` from the extension and have no ``HAVE_TE`` of their own."""


@functools.cache
def execute(name: str) -> types.ModuleType:
    """A module of Megatron's as it is when its import of Transformer Engine succeeds.

    It is no copy that anybody imports, but it is listed with Megatron's modules, under a name that no import
    finds, so that what it has copied from them is patched with theirs.
    """
    spec = importlib.util.find_spec(name)
    loader: Any = spec and spec.loader
    code = loader.get_code(name)
    module = types.ModuleType(name)  # the name says to whom its code belongs: Megatron
    vars(module).update(
        __package__=name.rpartition(".")[0],
        __file__=code.co_filename,
        __builtins__={**vars(builtins), "__import__": import_with_layers},
    )
    exec(code, vars(module))
    if name == EXTENSION:
        arguments = "_get_extra_te_kwargs"
        vars(module)[arguments] = without_fp8(vars(module)[arguments])
    sys.modules[f"{name} (accel)"] = module
    return module


def without_fp8(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """What every layer with weights asks for the arguments that follow from its config."""

    @functools.wraps(original)
    def extra_te_kwargs(config: Any) -> dict[str, Any]:
        for name in _QUANTIZED:
            if getattr(config, name, None):
                raise ValueError(f"{name}={getattr(config, name)!r}: {_UNQUANTIZED}")
        return original(config)

    return extra_te_kwargs


@functools.cache
def _modules() -> dict[str, types.ModuleType]:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    from accel.patches import moe_fusion

    router = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")
    return stand_in.modules(
        distributed={"CudaRNGStatesTracker": CudaRNGStatesTracker},
        router={n: getattr(moe_fusion, n) for n in (*router, "fused_topk_with_score_function")},
    )


@functools.cache
def _utils_that_tell(version: str) -> types.ModuleType:
    utils = types.ModuleType(_UTILS)
    vars(utils).update(vars(importlib.import_module(_UTILS)))
    vars(utils).update(
        get_te_version=lambda: Version(version),
        is_te_min_version=functools.partial(_is_at_least, version),
    )
    return utils


def import_with_layers(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: tuple[str, ...] | None = (),
    level: int = 0,
) -> Any:
    """``__import__`` that finds accel's layers as Transformer Engine's, for the code it is given to."""
    package = name.partition(".")[0]
    if name == EXTENSION and fromlist:
        return execute(EXTENSION)
    if name == _UTILS and fromlist:
        asks = str((globals or {}).get("__name__"))
        return _utils_that_tell(VERSIONS.get(asks, VERSIONS[EXTENSION]))
    if package == "transformer_engine":
        found = _modules().get(name if fromlist else package)
        if found is None:
            raise ModuleNotFoundError(f"accel's layers have no {name}", name=name)
        return found
    return builtins.__import__(name, globals, locals, fromlist or (), level)


def importing_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """The package itself is imported where there is one after all."""

    @functools.wraps(original)
    def importing(*args: Any, **kwargs: Any) -> Any:
        there = "transformer_engine" in sys.modules
        return told(original, {} if there else _modules())(*args, **kwargs)

    return importing


def _is_at_least(ours: str, version: str, check_equality: bool = True) -> bool:
    wanted = Version(version)
    return Version(ours) >= wanted if check_equality else Version(ours) > wanted


def get_version(original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def get_te_version() -> Any:
        asks = _asking()
        ours = VERSIONS.get(asks) or VERSIONS.get(asks.partition(".")[0])
        return original() if ours is None else Version(ours)

    return get_te_version


def version_for_packs(original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def get_te_version() -> Any:
        found = original()
        return max(found, Version(_SINCE)) if _asking() in PARTITION else found

    return get_te_version


def _asking() -> str:
    """The module of Megatron's that asks the wrapper which calls this, whatever wraps that one."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _module_name(frame) == __name__:
        frame = frame.f_back
    if _module_name(frame) == _UTILS and frame is not None:
        frame = frame.f_back  # is_te_min_version, on behalf of its own caller
    return _module_name(frame)


def _module_name(frame: types.FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def with_starts(original: Callable[..., Any]) -> Callable[..., Any]:
    """0.17's own loader never gives the second, and a rank's tokens are found by it; later versions take the
    first, as here."""

    @functools.wraps(original)
    def get_thd_batch_on_this_cp_rank(
        batch: dict[str, Any],
        cu_seqlens: torch.Tensor,
        cu_seqlens_padded: torch.Tensor | None,
        max_seqlen: torch.Tensor,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> Any:
        padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        return original(batch, cu_seqlens, padded, max_seqlen, cp_size, cp_rank)

    return get_thd_batch_on_this_cp_rank


@contextlib.contextmanager
def told_while_validating(context: Context) -> Iterator[None]:
    """Megatron's validation of its arguments asks for versions too, before any feature is on."""
    if _idle(context):
        yield
        return
    told = patching.apply([_VERSION])
    try:
        yield
    finally:
        told.undo()


def with_final_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def block_submodules(
        config: Any, spec: Any, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> Any:
        from megatron.core.transformer import transformer_block

        from accel.patches.te_extension import TENorm  # type: ignore[attr-defined]

        submodules = original(config, spec, vp_stage, pp_rank)
        if submodules is not spec and submodules.layer_norm is transformer_block.LayerNormImpl:
            submodules = dataclasses.replace(submodules, layer_norm=TENorm)
        return submodules

    return block_submodules


def with_te_norm(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        from accel.patches.te_extension import TENorm  # type: ignore[attr-defined]

        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for norm in ("ln_pre_impl", "ln_post_impl"):
            if given.arguments.get(norm) is torch.nn.LayerNorm:
                given.arguments[norm] = TENorm
        original(*given.args, **given.kwargs)

    return init


def by_hidden_size(norm: Callable[..., Any]) -> Callable[..., Any]:
    def make(hidden_size: int, **options: Any) -> Any:
        return norm(hidden_size, **options)

    return make


modelopt_te = types.SimpleNamespace(
    pytorch=types.SimpleNamespace(
        LayerNorm=by_hidden_size(stand_in.LayerNorm), RMSNorm=by_hidden_size(stand_in.RMSNorm)
    )
)
"""Transformer Engine's norms as ModelOpt's `Norm` calls them."""


@functools.cache
def awaited_spec() -> Any:
    """What stands for the spec of BERT's layers until they are there; before, it has nothing but an error."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    fields = {field.name for field in dataclasses.fields(ModuleSpec)}

    class AwaitedSpec(ModuleSpec):
        def __init__(self) -> None:
            pass

        def __getattribute__(self, name: str) -> Any:
            if name in fields:
                raise ImportError(
                    "Transformer Engine is not installed, and accel's te_layers is not active, which would "
                    "serve the layers that this BERT has by default: leave out --transformer-impl local, or "
                    "give --spec local"
                )
            return super().__getattribute__(name)

    return AwaitedSpec()


def awaiting_layers(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wraps the ``__getattr__`` of BERT's specs, which Megatron's script asks for one when it is imported,
    before any feature is on."""

    @functools.wraps(original)
    def find(name: str) -> Any:
        try:
            return original(name)
        except ImportError:
            if te_installed():
                raise
            return awaited_spec()

    return find


def give_awaited() -> Callable[[], None]:
    """The spec is what was waited for; returns what takes it back."""
    from megatron.core.models.bert import bert_layer_specs

    spec, found = awaited_spec(), bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    before = type(spec)
    spec.__class__ = type(found)
    vars(spec).update(vars(found))

    def take_back() -> None:
        vars(spec).clear()
        spec.__class__ = before

    return take_back


def switch_on() -> Callable[[], None]:
    """What no patch does, since an undo would take late copies of ModelOpt's `Linear` with it."""
    modelopt, *mla = map(_imported, (MODELOPT, _MLA, _ABSORBED_MLA))
    before = [(module, vars(module).get("Linear")) for module in mla if module and modelopt]
    if early := asked_before():
        log_once(
            "te_layers",
            f"{', '.join(early)}: HAVE_TE is False there, and layers are None, since it was imported before "
            "Megatron's arguments were final; import it after that",
        )
    undo, take_back = make_again(), give_awaited()
    for module, _ in before:
        vars(module)["Linear"] = vars(modelopt)["Linear"]

    def off() -> None:
        for module, linear in before:
            vars(module)["Linear"] = linear
        take_back()
        undo()

    return off


def asked_before() -> list[str]:
    """Modules of the program's own that have asked for Transformer Engine's layers as Megatron's do, before
    they were there, and hold none."""
    return [
        name
        for name, module in list(sys.modules.items())
        if type(module) is types.ModuleType  # others may import something when they are asked
        and name.partition(".")[0] not in ("megatron", "accel")
        and vars(module).get("HAVE_TE") is False
        and any(vars(module).get(layer, module) is None for layer in CLASSES)
    ]


def _imported(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:  # of another Megatron
        return None


def make_again() -> Callable[[], None]:
    """Specs of hybrid models and lists of types are made when their module is imported, and hold the mocks by
    value: they are made once more, specs also for the modules that have copied them. Returns what brings the
    old ones back."""
    modules = [m for m in map(sys.modules.get, MOCKS_BY_VALUE) if m is not None]
    before = _names_of(modules)

    def undo() -> None:
        made = _names_of(modules)
        for module, names in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(names)
        _replace_copies(made, before)

    try:
        for module in modules:
            importlib.reload(module)
        _replace_copies(before, _names_of(modules))
    except BaseException:
        undo()
        raise
    return undo


def _names_of(modules: Sequence[types.ModuleType]) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in modules]


def _replace_copies(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> None:
    """Whoever holds a spec of the `old` modules, under any name, gets that of the `new`."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    swaps = {
        id(spec): (spec, after[name])
        for before, after in zip(old, new, strict=True)
        for name, spec in before.items()
        if isinstance(spec, ModuleSpec) and name in after
    }
    for module, name, (_, spec) in list(aliases(swaps, AUDIENCE)):
        setattr(module, name, spec)


def refuse_quantized(args: Any) -> None:
    """Raises ValueError where Megatron's arguments ask for FP8 or FP4."""
    for name in _QUANTIZED:
        if getattr(args, name, None):
            raise ValueError(f"--{name}-format {getattr(args, name)}: {_UNQUANTIZED}")


def prepare(context: Context) -> list[str]:
    """Changes nothing; a line for what these layers do not look at.

    Raises:
        ValueError: accel's layers cannot do what is asked for; so before anything is built.
    """
    args = context.args
    if te_installed() or getattr(args, "transformer_impl", None) != "transformer_engine":
        return []
    refuse_quantized(args)
    _refuse_packs(context)
    of_logits = [flag_of(name) for name in _OF_LOGITS if getattr(args, name, False)]
    if of_logits and not (getattr(args, "bf16", False) or getattr(args, "fp16", False)):
        raise ValueError(
            f"{' '.join(of_logits)} in fp32: Megatron looks for the layers behind the wrapper of its 16 bit "
            "models, and fails in the first step: give --bf16 or --fp16"
        )
    if getattr(args, "reset_attention_mask", False):
        return [
            "--reset-attention-mask does nothing with --transformer-impl transformer_engine: causal "
            "attention takes no mask there, accel's as Transformer Engine's; with local it does"
        ]
    return []


def _refuse_packs(context: Context) -> None:
    packing = [name for name in PACKING if getattr(context.args, name, False)]
    if getattr(context.args, "hybrid_context_parallel", False):
        packing += [] if context.megatron.startswith("0.17.") else ["hybrid_context_parallel"]
    asked = [flag_of(name) for name in _OF_LOGITS if getattr(context.args, name, False)]
    if packing and asked:
        raise ValueError(
            f"{' '.join(asked)} with {' '.join(map(flag_of, packing))}: accel's layers have that for whole "
            "sequences, not for packed ones: leave one of them out"
        )


def _idle(context: Context) -> str | None:
    asked = getattr(context.args, "transformer_impl", "transformer_engine")
    return te_serves(context) or (
        None if asked == "transformer_engine" else f"--transformer-impl {asked}"
    )


AWAITING = Patch(
    target=f"{_CORE}.models.bert.bert_layer_specs:__getattr__",
    replacement="accel.patches.te_layers:awaiting_layers",
    how="wrap",
    expects=("name",),
    why="Megatron's BERT script imports a spec, and upstream raises, before arguments say that it is served.",
)
"""For the time before features are chosen."""

_WHY = "Without Transformer Engine upstream's class derives from a mock, or is None."


def _class(module: str, name: str) -> Patch:
    return Patch(
        target=f"{module}:{name}",
        replacement=f"accel.patches.te_extension:{name}",
        why=_WHY,
        optional=True,
    )


_VERSION = Patch(
    target=f"{_UTILS}:get_te_version",
    replacement="accel.patches.te_layers:get_version",
    how="wrap",
    expects=(),
    why="Each gate is told what accel's layers can do.",
)

_FLAGS = (
    *((module, "HAVE_TE") for module in (EXTENSION, EXPERTS, *GUARDED) if module not in UNGUARDED),
    (f"{_CORE}.models.gpt.experimental_attention_variant_module_specs", "HAVE_TE"),
    (f"{_CORE}.transformer.heterogeneous.linear_replacements", "HAVE_TE"),
)


def _flag(module: str, flag: str) -> Patch:
    return Patch(
        target=f"{module}:{flag}",
        replacement="accel.patches.te_layers:HAVE_TE",
        why="There it guards names that are bound now.",
        optional=True,
    )


OF_PACKS = (
    *(
        Patch(
            target=f"{module}:tex",
            replacement="accel.layers.stand_in:tex",
            why="Which tokens of a pack a rank holds needs no Transformer Engine.",
            optional=True,
        )
        for module in PARTITION
    ),
    _flag(f"{_CORE}.models.mimo.partition.utils", "_HAVE_TEX"),
    _flag(f"{_CORE}.models.multimodal.llava_model", "HAVE_TEX"),
    Patch(
        target=f"{_UTILS}:get_thd_batch_on_this_cp_rank",
        replacement="accel.patches.te_layers:with_starts",
        how="wrap",
        expects=("batch", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "cp_size", "cp_rank"),
        why="0.17's loader gives no lengths with padding, by which upstream looks for a rank's tokens.",
        optional=True,
    ),
    Patch(
        target=f"{_UTILS}:get_te_version",
        replacement="accel.patches.te_layers:version_for_packs",
        how="wrap",
        expects=(),
        why="The gates before these calls are told that they are served.",
    ),
)
"""What a pack needs whose sequences are split over ranks, in either spec: those of `packs_over_ranks`."""

FEATURE = Feature(
    name="te_layers",
    summary="serve --transformer-impl transformer_engine by accel's layers where it is not installed",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    idle=_idle,
    prepare=prepare,
    around_validation=told_while_validating,
    switch_on=switch_on,
    patches=(
        *(_class(EXTENSION, name) for name in CLASSES),
        *(_class(module, name) for module, names in GUARDED.items() for name in names),
        *(
            Patch(
                target=f"{module}:{served.partition(':')[2]}",
                replacement=served,
                how="provide",
                why="Without Transformer Engine the name is not bound, and using it is a NameError.",
                optional=True,
            )
            for module, what in UNBOUND.items()
            for served in what
        ),
        *(_flag(module, flag) for module, flag in _FLAGS),
        *OF_PACKS,
        Patch(
            target=f"{MODELOPT}:te",
            replacement="accel.patches.te_layers:modelopt_te",
            optional=True,
            why="Its norms are those of the package.",
        ),
        Patch(
            target=f"{EXPERTS}:te",
            replacement="accel.patches.te_extension:te",
            why="The operations that grouped experts are made of with the op fuser.",
            optional=True,
        ),
        *(
            Patch(
                target=f"{EXPERTS}:{name}",
                replacement="accel.layers.stand_in:no_fp8",
                why="Grouped experts in FP8 call it when they are made, and it is None.",
            )
            for name in ("Fp8Padding", "Fp8Unpadding")
        ),
        Patch(
            target=f"{EXPERTS}:TEGroupedMLP._is_fused_impl_supported",
            replacement="accel.patches.te_layers:importing_layers",
            how="wrap",
            expects=("self",),
            why="It imports these operations from the package.",
            optional=True,
        ),
        Patch(
            target=f"{_CORE}.models.vision.clip_vit_model:CLIPViTModel.__init__",
            replacement="accel.patches.te_layers:with_te_norm",
            how="wrap",
            why="Upstream's norm without Transformer Engine is torch's, which does not take its arguments.",
        ),
        Patch(
            target=f"{_CORE}.transformer.transformer_block:_get_block_submodules",
            replacement="accel.patches.te_layers:with_final_norm",
            how="wrap",
            expects=("config", "spec", "vp_stage", "pp_rank"),
            why="The final norm of a block that is given one layer spec is Transformer Engine's too.",
        ),
        _VERSION,
    ),
)
