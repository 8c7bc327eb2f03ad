"""Every patch of every feature, against every supported Megatron: each feature gets these tests for
free."""

from __future__ import annotations

import inspect
import json
from functools import lru_cache
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from accel.patches import FEATURES, command_line
from accel.patching import Patch, around, resolve
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import output_with

PATCHES = [p for f in FEATURES for p in f.patches] + list(command_line.HOOKS)

_PROBE = """
import importlib, json, sys, types, warnings
warnings.simplefilter("ignore")
from accel import patching
from accel.device import select
from accel.patches import FEATURES, command_line
from accel.upstream import megatron_version
select("cpu").install(("megatron",))
rows = {"version": megatron_version(), "patches": {}}
everything = [p for f in FEATURES for p in f.patches] + list(command_line.HOOKS)
for patch in everything:
    try:
        importlib.import_module(patch.target.partition(":")[0])  # now: not while one patch alone is in place
    except ImportError:
        if not patch.optional:
            raise
for patch in everything:
    row = rows["patches"][patch.target + " " + patch.replacement] = {"problem": None, "missing": False}
    try:
        row["missing"] = patch.optional and not patching.plan([patch])
        if row["missing"]:
            continue
        provided = patch.how == "provide"
        owner, name, before = (None,) * 3 if provided else patching.resolve(patch.target)
        row["place"] = f"{id(owner)}.{name}" if owner else patch.target
        adapter = patching.resolve(patch.replacement)[2]
        if isinstance(adapter, patching.around):
            row["twice"] = patching.parameters(adapter)[0] in patching.parameters(before)
        row["others"] = patching.replaced_by(patch.target) if patch.takes_over else None
        with patching.apply([patch], scope=("megatron",)) as applied:
            row["bindings"] = len(applied.bindings)
            row["stale"] = [] if before is None or not callable(before) else [
                f"{n}.{k}" for n, m in list(sys.modules.items())
                if isinstance(m, types.ModuleType) and n.split(".")[0] == "megatron"
                for k, v in list(vars(m).items()) if v is before]
        after = None if provided else patching.resolve(patch.target)[2]
        row["restored"] = after is before
        if patch.sources:
            row["hash"] = patching.source_hash(before)
    except (patching.PatchError, ImportError) as e:
        row["problem"] = str(e)
rows["together"] = len(patching.plan(p for f in FEATURES for p in f.patches))
print("\\n" + json.dumps(rows))
"""


def key(patch: Any) -> str:
    """Two features may wrap the same target."""
    return f"{patch.target} {patch.replacement}"


@lru_cache
def _probed(version: str) -> dict[str, Any] | Exception:
    try:
        result: dict[str, Any] = json.loads(output_with(version, _PROBE).splitlines()[-1])
    except Exception as error:  # for each test anew, but found once
        return error
    return result


def probe(version: str) -> dict[str, Any]:
    """Apply and undo every patch in a process of its own, on one Megatron version."""
    result = _probed(version)
    if isinstance(result, Exception):
        raise result
    assert result["version"] == version
    return result


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.target.rpartition(".")[2])
def test_patch_fits_rebinds_everything_and_is_undone(patch: Patch, version: str) -> None:
    row = probe(version)["patches"][key(patch)]
    assert row["problem"] is None
    if row["missing"]:
        there = [v for v in SUPPORTED_MEGATRON if not probe(v)["patches"][key(patch)]["missing"]]
        assert there, "an optional target exists in some version"
        return
    assert row["bindings"] >= 1
    assert row["stale"] == []
    assert row["restored"]
    assert not row.get("twice"), (
        "the adapter's name of the original is one that upstream's callers pass"
    )
    assert row.get("others") is None, "upstream's own would be taken for somebody else's patch"
    if patch.sources:
        assert row["hash"] == patch.sources[version]


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_all_patches_fit_together(version: str) -> None:
    found = probe(version)
    rows = [found["patches"][key(patch)] for f in FEATURES for patch in f.patches]
    # one place may have two names: upstream moves classes and leaves aliases
    assert found["together"] == len({row["place"] for row in rows if not row["missing"]})


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_feature_declares_itself(feature: Any) -> None:
    assert len(feature.doc) > 150, "the module docstring is the feature's page"
    assert len(feature.summary) > 20
    names = {f.name for f in FEATURES}
    assert set(feature.requires) | set(feature.relieves) <= names
    assert any(v in SpecifierSet(feature.megatron) for v in SUPPORTED_MEGATRON)
    for patch in feature.patches:
        assert len(patch.why) > 20
        if patch.how == "replace" and patch.target.startswith("megatron") and patch.expects:
            assert set(patch.sources) == set(SUPPORTED_MEGATRON), "a replaced body is hashed"


def test_conflicts_name_real_options() -> None:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    known = {a.dest for a in add_megatron_arguments(argparse.ArgumentParser())._actions}
    known |= {f.name for f in FEATURES}
    assert {c for f in FEATURES for c in f.conflicts} <= known


def test_aliases_lead_to_our_flags_and_hide_nothing_of_megatron() -> None:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    flags = {f.flag for f in FEATURES} | {s.flag(f.name) for f in FEATURES for s in f.settings}
    upstream = add_megatron_arguments(argparse.ArgumentParser())._option_string_actions
    for theirs, ours in command_line.ALIASES.items():
        assert ours in flags
        assert theirs not in upstream


def test_every_patch_has_its_adapter_with_upstreams_parameters() -> None:
    """Adapters that replace a body take exactly upstream's parameters, never ``*args``."""
    for patch in PATCHES:
        if patch.how == "replace" and patch.expects:
            adapter = resolve(patch.replacement)[2]
            assert tuple(inspect.signature(adapter).parameters) == patch.expects, patch.replacement


def test_an_adapter_around_names_upstreams_parameters_once() -> None:
    """`expects` is for those that differ."""
    for patch in PATCHES:
        adapter = resolve(patch.replacement)[2]
        if isinstance(adapter, around) and patch.expects is not None:
            assert patch.expects != adapter.expects, patch.replacement
