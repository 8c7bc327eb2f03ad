"""Our flags in Megatron's own parser, and the moment when its arguments are final.

``add_megatron_arguments(parser)`` and ``validate_args(args, defaults)`` are the two functions that
have kept their place and signature through every supported version. What ends up on ``args`` is
pickled into each checkpoint, so only plain types go there.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from accel.feature import PRESETS, Context, Feature
from accel.patches import _mindspeed
from accel.patches._te_awaited import AWAITING
from accel.patching import Patch, around
from accel.upstream import megatron_version

__all__ = ["ALIASES", "HOOKS", "MODULE", "add_options"]

MODULE = "megatron.training.arguments"

ALIASES = {
    **_mindspeed.ALIASES,
    "--accel-tp-chunks": "--accel-tp-overlap-chunks",
    "--context-parallel-kv-cache-interval": "--accel-context-parallel-keep-interval",
}
"""Another spelling -> ours: MindSpeed's, a short one, and one beside MindSpeed's."""

HOOKS = (
    Patch(
        target=f"{MODULE}:add_megatron_arguments",
        replacement="accel.patches.command_line:with_accel_options",
        how="wrap",
        why="accel's flags belong to Megatron's own parser, so that --help and errors know them.",
    ),
    Patch(
        target=f"{MODULE}:validate_args",
        replacement="accel.patches.command_line:apply_when_final",
        how="wrap",
        why="Features can be chosen and checked once Megatron's arguments are final.",
    ),
    Patch(
        target="megatron.training.yaml_arguments:validate_yaml",
        replacement="accel.patches.command_line:apply_when_final",
        how="wrap",
        why="With --yaml-cfg Megatron validates its arguments elsewhere; features apply there too.",
    ),
    AWAITING,
)
"""Applied as soon as Megatron's arguments are imported, before any feature."""


_SWITCHES = ("strict", "allow_untested_megatron")

_PARSED: dict[str, Any] = {}
"""accel's flags as the parser last saw them."""


@around
def with_accel_options(
    add_megatron_arguments: Callable[..., Any], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    parser = add_megatron_arguments(parser)
    add_options(parser)
    _mend_help(parser)
    return parser


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """``--help``, where a stray percent sign in one of Megatron's texts (0.19.2) ends it in an error."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (KeyError, TypeError, ValueError):
                action.help = action.help.replace("%", "%%")


@around
def apply_when_final(
    validate_args: Callable[..., Any],
    args: argparse.Namespace,
    defaults: dict[str, Any] = {},  # noqa: B006 (upstream's)
) -> Any:
    """Wraps the validators of both ways to configure Megatron: flags, and ``--yaml-cfg``."""
    from accel.patches import FEATURES
    from accel.session import SESSION
    from accel.start_up import print_table

    context = Context(SESSION.require_device().name, megatron_version() or "", args)
    flags = {**_PARSED, **{k: v for k, v in vars(args).items() if k.startswith("accel_")}}
    given = {name.removeprefix("accel_"): v for name, v in flags.items() if v is not None}
    # a flag that only can be given is False where it was not
    given = {n: v for n, v in given.items() if v or n not in _SWITCHES}
    asked = _still_asked(SESSION.asked, given)
    wishes = asked | given
    _show(args, wishes)
    wanted = [f for f in FEATURES if wishes.get(f.name) is not False]
    for f in wanted:
        if f.check is not None:
            f.check(context)
    notes = [note for f in wanted if f.prepare is not None for note in f.prepare(context)]
    notes += _kernels(context)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_connections_allowed(context))
        for f in wanted:
            if f.around_validation is not None:
                stack.enter_context(f.around_validation(context))
        validated = validate_args(args, defaults)
    final = args if validated is None else validated  # another one with --yaml-cfg
    _show(final, wishes)
    SESSION.apply(
        preset=wishes.get("preset", "fast"),
        wishes=wishes,
        strict=wishes.get("strict", False),
        allow_untested=wishes.get("allow_untested_megatron", False),
        args=final,
    )
    if args.rank == 0:
        print_table(SESSION.status(), notes)
    return validated


def _kernels(context: Context) -> list[str]:
    """Whose kernels an environment variable asks for; what there is not is an error before the start."""
    if context.device != "cuda":
        return []
    from accel.ops import _kernel_choice, _peers

    described = _peers.describe(_kernel_choice.chosen())
    return [described] if described else []


def _show(args: Any, wishes: Mapping[str, Any]) -> None:
    """As the arguments that features read: options of ``accel.enable()``, and flags that yaml has dropped."""
    for name, value in wishes.items():
        if getattr(args, f"accel_{name}", None) is None:
            setattr(args, f"accel_{name}", value)


def _still_asked(options: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``accel.enable()``, but for the values of features that flags have put out of use."""
    from accel.patches import FEATURES

    def dropped(feature: Feature) -> bool:
        wish = flags.get(feature.name, options.get(feature.name))
        return wish is False or (wish is None and "preset" in flags)

    settings = {s.key(f.name) for f in FEATURES if dropped(f) for s in f.settings if s.name}
    return {n: v for n, v in options.items() if n not in settings and n != "device"}


@contextlib.contextmanager
def _connections_allowed(context: Context) -> Iterator[None]:
    """Megatron's validator wants ``CUDA_DEVICE_MAX_CONNECTIONS=1`` (FSDP: not 1), a number of CUDA
    work queues, which neither a CPU nor an Ascend card has.

    There the value is shown for the length of the check; the user's environment stays as it was.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    fsdp = any(getattr(context.args, f"use_{f}", False) for f in ("megatron_fsdp", "torch_fsdp2"))
    if context.device == "cuda" or fsdp or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add accel's argument group; afterwards the parser rejects misspelt ``--accel-*`` flags by
    itself."""
    from accel.patches import FEATURES

    group = parser.add_argument_group("accel")
    group.add_argument(
        "--accel-preset",
        choices=PRESETS,
        help="off: the device runtime, and what stock Megatron needs to run at all; exact: plus what is "
        "bit-identical to stock Megatron; fast (default): plus fused ops within tested tolerance, and "
        "weights that share memory with their masters; max: plus cross entropy without whole logits, and "
        "activations' gradients in place, which save memory",
    )
    group.add_argument(
        "--accel-strict", action="store_true", help="a feature that would be skipped is an error"
    )
    group.add_argument(
        "--accel-allow-untested-megatron",
        action="store_true",
        help="try Megatron versions outside the tested range; patch contracts are still checked",
    )
    for f in FEATURES:
        dest = f"accel_{f.name}"
        own = next((s for s in f.settings if not s.name), None)
        takes: dict[str, Any] = {"action": "store_true", "default": None}
        if own is not None:
            optional = {"nargs": "?", "const": True} if own.default is not None else {}
            takes = {"metavar": own.metavar, **({"nargs": "*"} if own.many else optional)}
        group.add_argument(*_spellings(f.flag), dest=dest, help=f.summary, **takes)
        for s in f.settings:
            if s.name:
                names, key = _spellings(s.flag(f.name)), f"accel_{s.key(f.name)}"
                group.add_argument(*names, dest=key, metavar=s.metavar, help=s.summary)
        group.add_argument(
            f.flag.replace("--", "--no-", 1),
            dest=dest,
            action="store_false",
            help=argparse.SUPPRESS,
        )
    _mindspeed.add_options(group)
    _check_words(parser)


def _spellings(flag: str) -> list[str]:
    return [flag, *(theirs for theirs, ours in ALIASES.items() if ours == flag)]


def _check_words(parser: argparse.ArgumentParser) -> None:
    """One line and exit status 2 for an unknown ``--accel-*`` flag, even where unknown flags are
    ignored; and a line for what MindSpeed's mean here, which Megatron then takes, refuses or ignores."""
    parse_known_args = parser.parse_known_args

    def checked(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Also remembers accel's flags: with ``--yaml-cfg`` Megatron drops what was parsed."""
        words = sys.argv[1:] if args is None else args
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        known = [s for s in parser._option_string_actions if "accel-" in s]
        for word in words:
            flag = word.partition("=")[0]
            if flag.startswith(("--accel-", "--no-accel-")) and flag not in known:
                near = difflib.get_close_matches(flag, known, n=1)
                if first:
                    hint = f"did you mean {near[0]}?" if near else "see python -m accel features"
                    print(f"accel: unknown flag {flag}; {hint}", file=sys.stderr)
                raise SystemExit(2)
        if first:
            for hint in _mindspeed.hints(words, parser._option_string_actions):
                print(f"accel: {hint}", file=sys.stderr)
        parsed = parse_known_args(args, namespace)
        lines = _mindspeed.translate(parsed[0])
        for line in lines if first else ():
            print(f"accel: {line}", file=sys.stderr)
        _PARSED.update({k: v for k, v in vars(parsed[0]).items() if k.startswith("accel_")})
        return parsed

    parser.parse_known_args = checked  # type: ignore[assignment, method-assign]
