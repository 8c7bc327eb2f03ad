"""``--cuda-graph-impl`` on a CPU, which has no CUDA graphs.

Megatron stops there, at the latest where it would make the first of them: it asks for random numbers that
graphs can hold, and for an Adam that they can. On a CPU ``--cuda-graph-impl``, and the older
``--enable-cuda-graph`` and ``--external-cuda-graph``, are taken for ``--cuda-graph-impl none``, with the
scopes and modules that Megatron checks beside them, and ``--optimizer-cuda-graph`` for not given. Numbers are
those without graphs; a line says so. On other devices nothing changes, nor in configurations without a
command line. ``--rl-persist-cuda-graphs`` and ``--rl-training-cuda-graphs`` stay what Megatron refuses then.
"""

from __future__ import annotations

from typing import Any

from accel.feature import Context, Feature
from accel.upstream import SUPPORTED_RANGE, flag_of

_SWITCHES = ("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph")
_MODULES = ("cuda_graph_scope", "cuda_graph_modules")
_OTHERS = ("cuda_graph_scope_deprecated", "inference_cuda_graph_scope")


def without_graphs(context: Context) -> list[str]:
    """Take the flags back on a CPU; a line if there were any."""
    args = context.args
    asked = _asked(args) if context.device == "cpu" else []
    if not asked:
        return []
    without: dict[str, Any] = {
        "cuda_graph_impl": "none",
        **dict.fromkeys(_SWITCHES, False),
        **{name: [] for name in _MODULES},
        **dict.fromkeys(_OTHERS),
    }  # as Megatron's parser leaves them without flags
    for name, value in without.items():
        if hasattr(args, name):
            setattr(args, name, value)
    return [f"{' '.join(asked)}: there are no CUDA graphs on a CPU, which trains without them"]


def _asked(args: Any) -> list[str]:
    """The flags that make graphs; none under yaml, where they are nested."""
    impl = getattr(args, "cuda_graph_impl", None) or "none"
    asked = [f"--cuda-graph-impl {impl}"] if impl != "none" else []
    asked += [flag_of(name) for name in _SWITCHES if getattr(args, name, False)]
    for name in ("cuda_graph_scope_deprecated", "cuda_graph_modules"):
        # from 0.18 on a word, which Megatron takes for an implementation
        if impl == "none" and "full_iteration" in (getattr(args, name, None) or ()):
            asked.append(f"{flag_of(name.removesuffix('_deprecated'))} full_iteration")
    return asked


def _idle(context: Context) -> str | None:
    """It is done when arguments are final."""
    return (
        "there is no command line"
        if context.args is None
        else "nothing asks for CUDA graphs any more"
    )


FEATURE = Feature(
    name="cuda_graphs",
    summary="accept --cuda-graph-impl on a CPU, and train without CUDA graphs",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    devices=("cpu",),
    idle=_idle,
    prepare=without_graphs,
)
