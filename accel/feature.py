"""What a feature is: its switch, patches, limits and documentation, in one object.

A feature knows nothing of how it is asked for (flags, ``accel.enable()``) nor of what the others
do; :func:`choose` turns what was asked for into a list of :class:`Choice`, one for each feature,
with the reason for everything that is not active. Imports nothing of accel but
:mod:`accel.patching` and :mod:`accel.upstream`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from accel.patching import Patch, replaced_by
from accel.upstream import flag_of

__all__ = [
    "PRESETS",
    "Choice",
    "Context",
    "Feature",
    "Setting",
    "choose",
    "read_settings",
    "taken_by_others",
]

PRESETS = ("off", "exact", "fast", "max")
"""Each preset contains those before it. ``off`` holds only what makes stock Megatron run at all
here."""

Preset = Literal["off", "exact", "fast", "max"]
State = Literal["active", "off", "idle", "skipped"]


@dataclass(frozen=True)
class Context:
    """What a feature may look at to say whether it can run here."""

    device: str
    """``cpu``, ``cuda`` or ``npu``."""
    megatron: str
    """Version of megatron-core."""
    args: Any = None
    """Megatron's arguments, or ``None`` in programs without a command line."""
    late: bool = False
    """Whether features are chosen after the arguments were final, by a program that may build its model
    otherwise: no feature of a preset is idle for what they say."""


def _never(context: Context) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value that a feature is given, with its own flag or with one beside it."""

    name: str
    """Snake case: ``--accel-<feature>-<name>``, ``accel.enable(<feature>_<name>=...)``. Empty: the feature's
    own flag takes the value."""
    metavar: str
    summary: str
    """One line: the help text of the flag."""
    parse: Callable[[Any], Any]
    """From what was typed, a word or a list of words, or what a program passed; a ``ValueError`` says what is
    allowed."""
    default: Any = None
    """None for the feature's own flag: it needs a value."""
    many: bool = False
    """Whether any number of words may follow the flag, none too."""

    def key(self, feature: str) -> str:
        """The option of ``accel.enable()``."""
        return f"{feature}_{self.name}" if self.name else feature

    def flag(self, feature: str) -> str:
        return flag_of("accel_" + self.key(feature))


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One row of the product's table of contents."""

    name: str
    """Snake case; the switch is ``--accel-<name>`` with dashes and ``--no-accel-<name>``."""
    summary: str
    """One line: the help text of the switch."""
    preset: Preset | None
    """The lowest preset that turns it on; None: it is asked for by name."""
    numerics: Literal["bit-identical", "tolerance"]
    """Against stock Megatron with the same arguments, where stock can run them at all."""
    megatron: str
    """PEP 440 range of megatron-core versions this feature is tested against."""
    patches: tuple[Patch, ...] = ()
    requires: tuple[str, ...] = ()
    """Names of features that are turned on with this one."""
    conflicts: Mapping[str, str] = field(default_factory=dict)
    """Attribute of Megatron's args, or name of a feature -> why it cannot be combined with this
    one."""
    refuses: Callable[[Context], str | None] = _never
    """Why it cannot serve what Megatron's args ask for, where `conflicts` cannot say it: an error if the
    feature was asked for by name, else *skipped*."""
    unavailable: Callable[[Context], str | None] = _never
    """Why it cannot run here: shown as *skipped*, an error under ``--accel-strict``."""
    idle: Callable[[Context], str | None] = _never
    """Why there is nothing for it to do here; not a fault."""
    aside: Callable[[Context], str | None] = _never
    """What it has no part in, though it is on for all else: told beside *active*."""
    relieves: Mapping[str, str] = field(default_factory=dict)
    """Name of a feature that has less to do, or nothing, where this one is active -> what is told beside its
    *active*."""
    check: Callable[[Context], None] | None = None
    """Raises ValueError for what Megatron's arguments ask for and nothing can serve, before Megatron's own
    validation and, where that did not see them, when they are final."""
    prepare: Callable[[Context], Sequence[str]] | None = None
    """Called before Megatron's own validation; may change ``context.args`` and returns a line for
    each that it changed."""
    around_validation: Callable[[Context], AbstractContextManager[object]] | None = None
    """Entered for the length of Megatron's own validation, when no feature is on yet."""
    switch_on: Callable[..., Callable[[], None]] | None = None
    """For what is no attribute of a module (a dispatcher kernel, say); is given the values of `settings` by
    name (that of the feature's own flag: ``value``) and returns the function that undoes it."""
    settings: tuple[Setting, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda", "npu")
    benchmarks: tuple[str, ...] = ()
    """Names in ``benchmarks/`` whose results belong on its page."""

    @property
    def flag(self) -> str:
        return flag_of("accel_" + self.name)

    @property
    def doc(self) -> str:
        """The docstring of the module that declares the feature, ``accel.patches.<name>``: its page
        in the docs."""
        return inspect.getdoc(sys.modules.get(f"accel.patches.{self.name}")) or ""


@dataclass(frozen=True)
class Choice:
    """What became of one feature."""

    feature: Feature
    asked: str
    """``flag``, ``preset``, ``required by <feature>``, ``no``."""
    state: State
    reason: str = ""


def choose(
    features: Sequence[Feature],
    preset: str,
    explicit: Mapping[str, Any],
    context: Context,
    *,
    strict: bool = False,
    allow_untested: bool = False,
    taken: Callable[[Feature], str | None] = lambda feature: None,
) -> list[Choice]:
    """Decide for each feature whether it runs.

    Args:
        explicit: feature name -> True or a value (asked for), False (forbidden), None or missing (the
            preset decides).
        strict: a feature that was asked for, by name or by preset, and cannot run is an error.
        allow_untested: take Megatron versions outside a feature's range.
        taken: who else has replaced what a feature replaces (:func:`taken_by_others`).

    Raises:
        ValueError: two features, or a feature and a Megatron option, that were both asked for by
            name exclude each other; what one that was asked for by name needs is refused; a name is
            unknown; or, with ``strict``, anything is skipped.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: use {', '.join(PRESETS)}")
    wishes = _wishes(features, _asked(features, preset, explicit), context)
    choices: list[Choice] = []
    for f in features:
        choice = _decide(f, wishes, context, allow_untested)
        if choice.state == "active" and (reason := taken(f)):
            choice = Choice(f, choice.asked, "skipped", reason)
        choices.append(_with_requirements(choice, choices))
    for relieving in active(choices):
        choices = [_relieved(c, relieving.relieves.get(c.feature.name)) for c in choices]
    if strict and (skipped := [c for c in choices if c.state == "skipped"]):
        lines = "; ".join(f"{c.feature.flag}: {c.reason}" for c in skipped)
        raise ValueError(f"--accel-strict: {lines}")
    return choices


def read_settings(choices: Sequence[Choice], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Feature name -> the values of its settings, for the features that run.

    Args:
        given: as for :func:`choose`, and the values of settings.

    Raises:
        ValueError: a value that a setting does not take, or one for a feature that nobody asked for.
    """
    found: dict[str, dict[str, Any]] = {}
    for choice in choices:
        feature, values = choice.feature, {}
        for setting in feature.settings:
            key = setting.key(feature.name)
            value = given.get(key)
            flag = setting.flag(feature.name)
            if choice.asked == "no" and setting.name and value is not None:
                raise ValueError(f"{flag} {value} does nothing without {feature.flag}")
            absent = value is None or (not setting.name and isinstance(value, bool))
            if absent and not setting.name and setting.default is None and choice.asked == "flag":
                raise ValueError(f"{flag} needs a value: {setting.metavar}")
            try:
                parsed = setting.default if absent else setting.parse(value)
            except ValueError as error:
                raise ValueError(f"{flag}: {error}") from None
            values[setting.name or "value"] = parsed
        if choice.state == "active":
            found[feature.name] = values
    return found


def _asked(features: Sequence[Feature], preset: str, explicit: Mapping[str, Any]) -> dict[str, str]:
    """Feature name -> how it was asked for; features that nobody wants are missing."""
    asked: dict[str, str] = {}
    for f in features:
        wish = explicit.get(f.name)
        if not (wish is None or isinstance(wish, bool) or any(not s.name for s in f.settings)):
            raise ValueError(f"{f.flag} takes no value, got {wish!r}: use True, False or None")
        if wish is not None and wish is not False:
            asked[f.name] = "flag"
        elif wish is None and f.preset and PRESETS.index(f.preset) <= PRESETS.index(preset):
            asked[f.name] = "preset"
    for f in reversed(features):  # what others require comes before them
        for needed in f.requires:
            if f.name not in asked:
                continue
            if explicit.get(needed) is not False:
                asked.setdefault(needed, f"required by {f.name}")
            elif asked[f.name] == "flag":
                flag = flag_of("accel_" + needed)
                raise ValueError(f"{f.flag} needs {flag}, which was turned off")
    return asked


@dataclass(frozen=True)
class _Wishes:
    """What is known before anything is decided, by the features' names."""

    asked: Mapping[str, str]
    """How; those that nobody wants are missing."""
    named: Mapping[str, Feature]
    """-> the feature that was asked for by name and needs it, perhaps itself."""
    resting: Mapping[str, str]
    """Why there is nothing to do."""


def _wishes(features: Sequence[Feature], asked: Mapping[str, str], context: Context) -> _Wishes:
    named: dict[str, Feature] = {}
    resting: dict[str, str] = {}
    for f in reversed(features):  # what others require comes before them
        if asked.get(f.name) == "flag":
            named[f.name] = f
        if f.name in named:
            named |= {needed: named[f.name] for needed in f.requires if needed not in named}
        if f.name in asked and (reason := _rests(f, asked[f.name], context)):
            resting[f.name] = reason
    return _Wishes(asked, named, resting)


def _rests(feature: Feature, how: str, context: Context) -> str | None:
    if context.device not in feature.devices:
        return f"concerns {', '.join(feature.devices)} only"
    return feature.idle(_told(how, context))


def _told(how: str, context: Context) -> Context:
    return context if how == "flag" or not context.late else replace(context, args=None)


def _decide(feature: Feature, wishes: _Wishes, context: Context, allow_untested: bool) -> Choice:
    how = wishes.asked.get(feature.name)
    if how is None:
        return Choice(feature, "no", "off")
    resting = wishes.resting.get(feature.name)
    if resting and how != "flag":  # what has nothing to do stands in nobody's way
        return Choice(feature, how, "idle", resting)
    if clash := _clash(feature, wishes, context):
        if needing := wishes.named.get(feature.name):
            needed = "" if needing is feature else f" ({needing.flag} needs {feature.flag})"
            raise ValueError(clash + needed)
        return Choice(feature, how, "skipped", clash)
    if context.device not in feature.devices:
        return Choice(feature, how, "idle", resting or "")
    if not allow_untested and context.megatron not in SpecifierSet(
        feature.megatron, prereleases=True
    ):
        return Choice(
            feature,
            how,
            "skipped",
            f"supports megatron-core {feature.megatron}, found {context.megatron}",
        )
    if reason := feature.unavailable(context):
        return Choice(feature, how, "skipped", reason)
    if resting:
        return Choice(feature, how, "idle", resting)
    return Choice(feature, how, "active", feature.aside(_told(how, context)) or "")


def _with_requirements(choice: Choice, earlier: Sequence[Choice]) -> Choice:
    """A feature is no better off than those it requires, which come before it in the table."""
    for other in earlier:
        if choice.state == "active" and other.feature.name in choice.feature.requires:
            if other.state == "skipped":
                reason = f"needs {other.feature.name}: {other.reason}"
                return Choice(choice.feature, choice.asked, "skipped", reason)
            if other.state != "active":
                reason = f"needs {other.feature.name}, which is {other.state}"
                reason += f": {other.reason}" if other.reason else ""
                return Choice(choice.feature, choice.asked, "idle", reason)
    return choice


def _relieved(choice: Choice, why: str | None) -> Choice:
    if why is None or choice.state != "active":
        return choice
    return replace(choice, reason="; ".join(filter(None, [choice.reason, why])))


def _clash(feature: Feature, wishes: _Wishes, context: Context) -> str | None:
    for other, why in feature.conflicts.items():
        if other in wishes.asked and not wishes.resting.keys() & {other, feature.name}:
            return f"{feature.flag} and {flag_of('accel_' + other)} exclude each other: {why}"
        if getattr(context.args, other, None):
            return f"{feature.flag} and {flag_of(other)} exclude each other: {why}"
    reason = feature.refuses(context)
    return f"{feature.flag}: {reason}" if reason else None


def taken_by_others(feature: Feature) -> str | None:
    """Why another library's patch, found in place, keeps the feature from running: it is left alone."""
    for patch in feature.patches:
        with suppress(
            Exception
        ):  # upstream's modules run code of their own; apply() tells what is wrong
            if patch.takes_over and (other := replaced_by(patch.target)):
                return f"{other} has replaced {patch.target}, and stays"
    return None


def active(choices: Iterable[Choice]) -> list[Feature]:
    """The features that run."""
    return [c.feature for c in choices if c.state == "active"]
