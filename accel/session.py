"""What accel has done to this process, and how to take it back.

Three sets of changes, undone in reverse: the device runtime, the hooks on Megatron's command line,
and the features. :data:`SESSION` is the one instance.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from wrapt import register_post_import_hook

from accel import device, patching
from accel.device import Device
from accel.feature import (
    Choice,
    Context,
    Feature,
    active,
    choose,
    read_settings,
    taken_by_others,
)
from accel.patches import FEATURES, command_line
from accel.patching import AUDIENCE, Applied, PatchError
from accel.upstream import SUPPORTED_MEGATRON, megatron_version

__all__ = ["SESSION", "Session"]

_GENERAL = ("preset", "strict", "allow_untested_megatron", "device")
_log = logging.getLogger("accel")
_STATE = "megatron.training.global_vars"
_OF_VALIDATION = "data_parallel_size"
"""What Megatron's validation has put on arguments, and no parser."""


class Session:
    """The state of accel in this process."""

    def __init__(self) -> None:
        self.device: Device | None = None
        self.preset = "fast"
        self.choices: list[Choice] = []
        self.asked: dict[str, Any] = {}
        """The options of `enable`, which hold until flags say otherwise."""
        self._device: Applied | None = None
        self._hooks: Applied | None = None
        self._features: Applied | None = None
        self._switched: list[Callable[[], None]] = []
        self._attached = False

    def attach(self, device_name: str | None = None) -> None:
        """Install the device runtime and hook Megatron's command line, now or as soon as it is
        imported."""
        if self._device is None:
            self.device = device.select(device_name)
            self._device = self.device.install(AUDIENCE)
        self._attached = True
        register_post_import_hook(self._hook, command_line.MODULE)

    def warn_if_late(self) -> None:
        """Of what keeps the features of a program with a command line off: they are applied when Megatron's
        arguments are validated, by the function that is hooked."""
        if stale := self._hooks.stale_copies() if self._hooks is not None else []:
            _log.warning(
                "copied from Megatron before accel was imported, and still upstream's: %s; no feature is on "
                "in a program that goes by them: import accel.megatron_adaptor first, or call accel.enable()",
                _some(stale),
            )
        elif _final_args() is not None:
            _log.warning(
                "accel was imported after Megatron's arguments were final, so no feature is on: import "
                "accel.megatron_adaptor before they are parsed, or call accel.enable()"
            )

    def enable(self, options: Mapping[str, Any]) -> None:
        """``accel.enable(**options)``."""
        self._check(options)
        if options.get("device") not in (None, "auto", self.device and self.device.name):
            self.disable()
        was_attached = self._attached
        self.attach(options.get("device"))
        self.apply(
            preset=options.get("preset", "fast"),
            wishes={name: value for name, value in options.items() if name not in _GENERAL},
            strict=bool(options.get("strict", False)),
            allow_untested=bool(options.get("allow_untested_megatron", False)),
            args=_with_wishes(_final_args(), options),
            late=True,
            attached_now=not was_attached,
        )
        for c in self.choices:  # nobody prints the table
            if c.asked == "flag" and c.state != "active":
                _log.warning("%s was asked for and is %s: %s", c.feature.name, c.state, c.reason)
        self.asked = dict(options)

    def apply(
        self,
        *,
        preset: str,
        wishes: Mapping[str, Any],
        strict: bool = False,
        allow_untested: bool = False,
        args: Any = None,
        late: bool = False,
        attached_now: bool = False,
    ) -> None:
        """Replace the set of active features. An error before anything has changed leaves the features that
        are on, and accel waiting for the next start, as in a notebook. Any other takes accel back.

        Args:
            wishes: feature name -> True, a value, False or None, and the values of settings.
            args: Megatron's, once they are final; None in a program without a command line.
            late: they were final before features were chosen: see `Context`.
            attached_now: for this call, so that accel is taken back on any error.
        """
        untouched = bool(self.choices) or not attached_now
        try:
            version = megatron_version()
            if version is None:
                newest = SUPPORTED_MEGATRON[-1]
                raise ValueError(f"no megatron.core found: pip install megatron-core=={newest}")
            if not allow_untested and version not in SUPPORTED_MEGATRON:
                raise ValueError(
                    f"accel supports megatron-core {', '.join(SUPPORTED_MEGATRON)}, found {version}; "
                    "nothing was patched (--accel-allow-untested-megatron tries it all the same)"
                )
            context = Context(self.require_device().name, version, args, late)
            choices = choose(
                FEATURES,
                preset,
                wishes,
                context,
                strict=strict,
                allow_untested=allow_untested,
                taken=taken_by_others,
            )
            settings = read_settings(choices, wishes)
            for f in active(choices) if args is not None else ():
                if f.check is not None:
                    f.check(context)
            if self._features is not None:
                self._features.check()
            untouched = False
            self._undo_features()
            self._features = _apply_patches(active(choices))
            for f in active(choices):
                if f.switch_on is not None:
                    self._switched.append(f.switch_on(**settings[f.name]))
        except BaseException as e:
            try:
                if not untouched:
                    self.disable()
            except PatchError as left:
                e.add_note(f"accel could not take everything back: {left}")
            raise
        self.preset, self.choices = preset, choices
        if stale := self._features.stale_copies():
            _log.warning(
                "copied from Megatron before accel's features were on, and still upstream's: %s; call "
                "accel.enable() before these modules are imported, or let them look it up in Megatron's "
                "module at each call",
                _some(stale),
            )
        for change in self._features.changes:
            _log.info("%s -> %s", change.target, ", ".join(p.replacement for p in change.patches))

    def disable(self) -> None:
        """Undo everything; harmless when there is nothing to undo.

        Raises :class:`PatchError`, and undoes nothing, if somebody rebound a patched name since. On Ascend
        it raises after all else is undone: torch-npu's redirect of ``torch.cuda`` stays.
        """
        for applied in (self._features, self._hooks, self._device):
            if applied is not None:
                applied.check()
        self._undo_features()
        self._attached = False
        self.choices, self.asked = [], {}
        if self._hooks is not None:
            self._hooks.undo()
            self._hooks = None
        if self._device is not None:
            self._device.undo()
            self.device = self._device = None

    def require_device(self) -> Device:
        """The device runtime that is installed; there is one after :meth:`attach`."""
        assert self.device is not None, "attach() comes first"
        return self.device

    def status(self) -> dict[str, Any]:
        """Plain types only: ready for JSON."""
        return {
            "device": self.device.name if self.device else None,
            "device_reason": self.device.reason if self.device else None,
            "megatron": megatron_version(),
            "preset": self.preset if self.choices else None,
            "features": {
                c.feature.name: {"asked": c.asked, "state": c.state, "reason": c.reason}
                for c in self.choices
            },
            "patches": [
                {"target": c.target, "replacement": [p.replacement for p in c.patches]}
                for c in (self._features.changes if self._features else [])
            ],
        }

    def _hook(self, module: Any) -> None:
        if self._attached and self._hooks is None:
            self._hooks = patching.apply(command_line.HOOKS, scope=AUDIENCE)

    def _undo_features(self) -> None:
        while self._switched:
            self._switched.pop()()
        if self._features is not None:
            self._features.undo()
            self._features = None

    @staticmethod
    def _check(options: Mapping[str, Any]) -> None:
        beside = (s.key(f.name) for f in FEATURES for s in f.settings if s.name)
        known = (*_GENERAL, *(f.name for f in FEATURES), *beside)
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"accel.enable() has no option {name!r}; {hint}")


def _final_args() -> Any:
    """Megatron's arguments where its command line was read and validated; else None. A program may have set
    others, which were never validated."""
    args = getattr(sys.modules.get(_STATE), "_GLOBAL_ARGS", None)
    return args if hasattr(args, _OF_VALIDATION) else None


def _with_wishes(args: Any, wishes: Mapping[str, Any]) -> Any:
    """A copy of the arguments that shows these wishes to features, and no earlier ones."""
    if args is None:
        return None
    known = {name: value for name, value in vars(args).items() if not name.startswith("accel_")}
    return SimpleNamespace(**known, **{f"accel_{name}": value for name, value in wishes.items()})


def _some(names: Sequence[str]) -> str:
    """The first five."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _apply_patches(features: Sequence[Feature]) -> Applied:
    """Apply the patches of all features as one set, one that features share once; a problem is told with the
    feature it concerns."""
    owner = {p.target: f.name for f in features for p in f.patches}
    patches = {id(p): p for f in features for p in f.patches}
    try:
        scope = (*AUDIENCE, *_beside_the_script())
        return patching.apply(list(patches.values()), scope=scope)
    except PatchError as e:
        lines = [f"{owner[p.target]}: {p.target}: {p.text}" for p in e.problems]
        raise PatchError("nothing was patched:\n  " + "\n  ".join(lines), e.problems) from None


def _beside_the_script() -> list[str]:
    """The modules in the script's folder, which are its own code, as ``gpt_builders`` is of Megatron-LM's
    ``pretrain_gpt.py``: what they have copied of Megatron is replaced as in the script. No packages."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return []
    folder = os.path.dirname(os.path.realpath(script))  # as Python looks for its modules
    files = {
        name: vars(module).get("__file__") or ""
        for name, module in list(sys.modules.items())
        if type(module) is ModuleType
    }
    return [
        name
        for name, file in files.items()
        if os.path.basename(file) == f"{name}.py"
        and os.path.dirname(os.path.realpath(file)) == folder
    ]


SESSION = Session()
