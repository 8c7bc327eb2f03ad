"""Files that name what is known to fail under `make test-megatron` and `make test-recipes`, and why."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet


def of(file: Path, version: str) -> dict[str, Any]:
    """What the file says of this version of Megatron."""
    known = tomllib.loads(file.read_text())
    for kind in ("failure", "not_run", "note"):
        known[kind] = [
            e for e in known.get(kind, ()) if version in SpecifierSet(e.get("megatron", ""))
        ]
    return known


def entry(name: str, known: list[dict]) -> dict | None:
    """The first of the entries that has a pattern for this name."""
    return next((e for e in known if any(fnmatch.fnmatchcase(name, p) for p in e["tests"])), None)


def without_folders(text: str) -> str:
    """Absolute paths are those of the machine: their last part alone."""
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)
