"""``python -m accel patches``: every patch, its contract, and whether it fits this Megatron.

The flags are those of a training launch and choose the features that are shown; without any, all
are. Every patch is planned, which resolves and checks it, and none is applied.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel import patching
from accel.cli import facts, tables
from accel.cli.parser import Parser
from accel.feature import Context, Feature, choose, read_settings
from accel.patches import FEATURES
from accel.patches.command_line import HOOKS, add_options
from accel.patching import Patch
from accel.upstream import SUPPORTED_MEGATRON

__all__ = ["main"]

_COLUMNS = (("fits", "how", "feature"), ("target", "replacement", "contract", "why"))
_SHORT = (("fits",), ("how",), ("target",), ("replacement",))


def main(argv: Sequence[str]) -> int:
    parser = Parser("patches")
    parser.add_argument(
        "--device", choices=("cpu", "npu"), help="also the patches of the device runtime"
    )
    add_options(parser)
    parser.set_defaults(accel_preset=None)  # to tell "not given" from the launch's own default
    args = parser.parse(argv)
    try:
        features = chosen(args)
    except ValueError as error:  # features that exclude each other
        parser.error(str(error))
    with _nothing_on_stdout():
        report: dict[str, Any] = {
            "megatron": vars(facts.megatron()),
            "supported": list(SUPPORTED_MEGATRON),
            "patches": rows({f.name: f.patches for f in features}, together=_any_flag(args)),
            "hooks": rows({"command_line": HOOKS}),
            "device": rows(_device_table(args.device)),
            "without_patches": [f.name for f in features if not f.patches],
        }
    everything = [*report["patches"], *report["hooks"], *report["device"]]
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, everything)
    return 0 if all(row["fits"] for row in everything) else 1


def chosen(args: argparse.Namespace) -> list[Feature]:
    """The features that a launch with these flags asks for, whether or not they can run here."""
    wishes = {name.removeprefix("accel_"): value for name, value in vars(args).items()}
    if not _any_flag(args):
        return list(FEATURES)
    context = Context(device="cpu", megatron=SUPPORTED_MEGATRON[-1])
    choices = choose(FEATURES, args.accel_preset or "fast", wishes, context)
    read_settings(choices, wishes)
    return [choice.feature for choice in choices if choice.asked != "no"]


def rows(
    patches_of: Mapping[str, Sequence[Patch]], *, together: bool = False
) -> list[dict[str, Any]]:
    """One row for each patch, as ``--json`` prints it.

    Args:
        together: they are all applied in one launch, so those of one target must get on; otherwise
            each is checked alone.
    """
    everything = [patch for patches in patches_of.values() for patch in patches]
    return [
        {
            "feature": feature,
            "target": patch.target,
            "how": patch.how,
            "replacement": patch.replacement,
            "why": patch.why,
            "contract": {
                "parameters": _parameters(patch),
                "sources": {v: patch.sources.get(v) for v in SUPPORTED_MEGATRON},
                "optional": patch.optional,
            },
            **_check([p for p in everything if p.target == patch.target] if together else [patch]),
        }
        for feature, patches in patches_of.items()
        for patch in patches
    ]


def _any_flag(args: argparse.Namespace) -> bool:
    settings = (s.key(f.name) for f in FEATURES for s in f.settings)
    wishes = (getattr(args, f"accel_{name}") for name in (*(f.name for f in FEATURES), *settings))
    return args.accel_preset is not None or any(wish is not None for wish in wishes)


def _parameters(patch: Patch) -> list[str] | None:
    contract = None
    with contextlib.suppress(Exception):  # the row's problem says what
        contract = patch.contract
    return None if contract is None else list(contract)


def _check(patches: Sequence[Patch]) -> dict[str, Any]:
    """Whether these patches of one target fit what is installed, and if not, why."""
    try:
        found = patching.plan(patches)
    except patching.PatchError as error:
        _, *problems = str(error).splitlines()
        told = (line.strip().removeprefix(f"{patches[0].target}: ") for line in problems)
        return {"fits": False, "problem": "; ".join(told)}
    except Exception as error:  # an import of Megatron's may raise anything: it goes in the row
        return {"fits": False, "problem": f"{type(error).__name__}: {error}"}
    return {"fits": True, "problem": None if found else "absent in this version, and optional"}


def _device_table(device: str | None) -> dict[str, Sequence[Patch]]:
    if device is None:
        return {}
    from accel.device import cpu, npu

    return {f"device {device}": {"cpu": cpu, "npu": npu}[device].patches()}


@contextlib.contextmanager
def _nothing_on_stdout() -> Iterator[None]:
    """Megatron's import prints and warns; stdout is for the result."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _show(report: Mapping[str, Any], everything: Sequence[Mapping[str, Any]]) -> None:
    tables.show([_text(row) for row in (*report["patches"], *report["hooks"])], _COLUMNS)
    if report["device"]:
        print()
        tables.show([_text(row) for row in report["device"]], _SHORT)
    print()
    for row in everything:
        if row["problem"]:
            print(f"{row['feature']}: {row['target']}: {row['problem']}")
    if report["without_patches"]:
        print(f"no patches of Megatron: {', '.join(report['without_patches'])}")
    version, place = report["megatron"]["version"], report["megatron"]["detail"]
    fitting = sum(row["fits"] for row in everything)
    print(
        f"{fitting} of {len(everything)} patches fit; "
        + (f"megatron-core {version} ({place})" if version else "megatron-core is not installed")
    )


def _text(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        **{name: row[name] for name in ("feature", "target", "how", "replacement", "why")},
        "fits": "ok" if row["fits"] else "NO",
        "contract": _contract(row["contract"]),
    }


def _contract(contract: Mapping[str, Any]) -> str:
    """``(x, eps) body b54d62a62531 in 0.17.1, 0.18.2``."""
    by_hash: dict[str, list[str]] = {}
    for version, source in contract["sources"].items():
        if source is not None:
            by_hash.setdefault(source, []).append(version)
    parameters = f"({', '.join(contract['parameters'])})" if contract["parameters"] else ""
    bodies = [f"body {source} in {', '.join(found)}" for source, found in by_hash.items()]
    optional = ["may be absent"] if contract["optional"] else []
    return " ".join(filter(None, [parameters, "; ".join([*bodies, *optional])]))
