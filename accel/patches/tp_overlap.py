"""Tensor parallelism whose linear layers compute while their operands and results travel.

``--accel-tp-overlap`` cuts the rows of each linear layer into pieces. The input of a column-parallel layer is
multiplied as it comes from the other ranks; the result of a row-parallel layer, and its gradient on the way
back, travel piece by piece beside the product. The gradient of a column-parallel layer's input, which
Megatron reduces beside the product of the weight's gradient, leaves while it is computed; the second gather
of the input stays as Megatron hides it.

``--accel-tp-chunks auto`` (the default) times the parts of each product where it first runs, on the
slowest rank, tries the four ways (numbers of pieces, and how these are sent) that should be quickest by these
times of those with the plain way's bits (one of all, if those that should be quicker than it have others)
beside the plain way, and takes the quickest if it is quicker than the plain way by 3 %, and is so again where
both run once more. Of a reduction beside a weight's gradient, what is timed is the whole backward pass. If no
way has the plain way's bits, as of sums over more than two ranks, times decide on roundings, in which two
trainings may then differ: a line names what was chosen, which is the same on every rank. A number gives every
product as many pieces, 1 none, and leaves no choice.
``--accel-tp-overlap-form`` says how they go, where ``auto`` would choose that too: ``ring``, from rank to
rank by sends and receives, for which own rows are multiplied while nothing has come yet (a number's own way);
or ``collective``, the one way of what is all-reduced. ``symmetric`` is PyTorch's own products
over symmetric memory ("async TP"), for GPUs of one host that read each other's memory by NVLink, under
sequence parallelism: with a number above 1 the way of every product, whichever it is; with ``auto`` one more
that is tried, if it has the plain way's bits or no other has. Not yet run on two GPUs, so only by name;
PyTorch's kernels wait without a time-out for a rank that is gone.

``--accel-tp-overlap-wgrad pieces`` sums a row-parallel layer's weight gradient in fp32 while the output's
gradient comes. By default (``whole``) it is one product of all rows, with stock's bits, and only the product
for the input's gradient hides what comes; pieces hide more where transfers take longer than that product, and
round after each.

With and without sequence parallelism (without it, slices are all-reduced), both specs,
frozen weights, recomputation, pipelines, delayed weight gradients, ``--defer-embedding-wgrad-compute``, any
number of rows. On two ranks the results are stock's, bit for bit, where the product of some rows has the bits
that these rows have in the whole product; with more ranks a sum's order may differ.

``--tp-comm-overlap``, for which stock needs Transformer Engine, turns it on too (``tp_comm_overlap``).
**Not with** FSDP, sharded weights (``--tensor-parallel-num-weight-shards``) and autocast, where upstream's
layers run as they are; experts' all-to-alls are not concerned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from accel.feature import Context, Feature, Setting
from accel.parallel import linear_overlap as overlap
from accel.parallel.overlapped_linear import FORMS, SYMMETRIC, Form
from accel.patches import _linear
from accel.upstream import SUPPORTED_RANGE, te_layers_asked

_AUTO = "auto"
WHOLE, PIECES = "whole", "pieces"


def parse_chunks(given: Any) -> int | None:
    """A number of pieces, at least 1; None for ``auto``."""
    if str(given) == _AUTO:
        return None
    try:
        chunks = int(str(given))
    except ValueError:
        chunks = 0
    if chunks < 1:
        raise ValueError(f"{given!r} is no number of pieces: give 1 (off) or more, or {_AUTO}")
    return chunks


def parse_form(given: Any) -> Form:
    for form in (*FORMS, SYMMETRIC):
        if given == form:
            return form
    raise ValueError(f"{given!r}: use {', '.join(FORMS)} or {SYMMETRIC}")


def parse_wgrad(given: Any) -> bool:
    """Whether weight gradients are summed in pieces."""
    if given in (WHOLE, PIECES):
        return given == PIECES
    raise ValueError(f"{given!r}: use {WHOLE} or {PIECES}")


def refused(context: Context) -> str | None:
    """Why products cannot overlap."""
    args = context.args
    if te_layers_asked(args):
        return "Transformer Engine's layers have --tp-comm-overlap; these are for --transformer-impl local"
    local = getattr(args, "transformer_impl", None) == "local"
    if local and getattr(args, "use_megatron_fsdp", False):
        return "--use-megatron-fsdp: upstream's own linear layers run in the local spec"
    return None


def idle(context: Context) -> str | None:
    ranks = getattr(context.args, "tensor_model_parallel_size", None)
    return "there is one tensor-parallel rank" if ranks == 1 else None


def switch_on(
    chunks: int | None = None, form: Form | None = None, wgrad: bool = False
) -> Callable[[], None]:
    chosen = overlap.Overlap(chunks, form, sums_in_pieces=wgrad)
    undo = ExitStack()
    undo.callback(_linear.switch_on())
    undo.callback(overlap.switch_on(chosen))
    return undo.close


FEATURE = Feature(
    name="tp_overlap",
    summary="compute linear layers while their operands and results travel",
    preset=None,
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    benchmarks=("tp_overlap",),
    refuses=refused,
    idle=idle,
    settings=(
        Setting(
            name="chunks",
            metavar="N",
            summary="pieces that a rank's rows are cut into, or auto",
            parse=parse_chunks,
        ),
        Setting(
            name="form",
            metavar="FORM",
            summary=f"how they travel: {' or '.join(FORMS)}; or {SYMMETRIC}",
            parse=parse_form,
        ),
        Setting(
            name="wgrad",
            metavar="HOW",
            summary=f"row layers' weight gradients: {WHOLE}, or in {PIECES} as gradients come",
            parse=parse_wgrad,
        ),
    ),
    switch_on=switch_on,
    patches=(_linear.LINEAR, *_linear.OVERLAP),
)
