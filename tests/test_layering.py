"""Who may import whom, and that importing accel does nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "accel"
NAMES_MEGATRON = ("patches", "cli")
"""Packages that may import Megatron (``cli`` reports its version)."""

JUDGE = ("testing/megatron_tests.py", "testing/megatron_plugin.py", "testing/megatron_arguments.py")
"""They run Megatron's own tests, with accel on top: nobody in accel imports them, and they may anything."""

FORBIDDEN = {
    "patching.py": ("accel", "torch", "megatron"),
    "log.py": ("accel", "torch", "megatron"),
    "slot.py": ("accel", "torch", "megatron"),
    "feature.py": (
        "accel.patches",
        "accel.ops",
        "accel.device",
        "accel.session",
        "torch",
        "megatron",
    ),
    "ops": ("accel.patches", "accel.session", "accel.feature", "accel.device", "megatron"),
    "_triton": ("accel.patches", "accel.session", "accel.feature", "accel.device", "megatron"),
    "_peers": ("accel.patches", "accel.session", "accel.feature", "accel.device", "megatron"),
    "_npu": ("accel.patches", "accel.session", "accel.feature", "accel.device", "megatron"),
    "memory": ("accel.patches", "accel.session", "accel.feature", "megatron"),
    "parallel": ("accel.patches", "accel.session", "accel.feature", "megatron"),
    "device": ("accel.patches", "accel.session", "accel.feature", "megatron"),
    "testing": ("accel.patches", "megatron"),
}


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    if str(file.relative_to(PACKAGE)) in JUDGE:
        return found
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: absolute imports only"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_import_direction(layer: str) -> None:
    path = PACKAGE / layer
    for file in [path] if path.suffix else sorted(path.rglob("*.py")):  # may not exist yet
        for name in imports(file):
            for forbidden in FORBIDDEN[layer]:
                assert not f"{name}.".startswith(f"{forbidden}."), f"{file} imports {name}"


def test_only_patches_import_megatron() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.relative_to(PACKAGE).parts[0] not in NAMES_MEGATRON:
            assert not [n for n in imports(file) if n.split(".")[0] == "megatron"], file


def test_no_global_statement_and_no_swallowed_exception() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not isinstance(node, ast.Global), f"{file}:{node.lineno}: no global"
            if isinstance(node, ast.ExceptHandler):
                swallowed = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                assert not swallowed, f"{file}:{node.lineno}: exception swallowed"


def test_no_links() -> None:
    """Archives, patches and some file systems keep no symbolic links: each becomes a file of one line."""
    tracked = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not [line for line in tracked.splitlines() if line.startswith("120000")]


def test_functions_are_short() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno
                assert length <= 120, f"{file}:{node.lineno}: {node.name} has {length} lines"


_PROBE = """
import json, os, sys
before, env = set(sys.modules), dict(os.environ)
events = []
sys.addaudithook(lambda event, args: events.append((event, str(args[:2]))) if event in
    ("socket.bind", "socket.connect", "os.mkdir", "os.rename", "subprocess.Popen", "os.putenv") or
    (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")) else None)
import accel
print(json.dumps({"modules": sorted({m.split(".")[0] for m in set(sys.modules) - before}),
                  "environment": dict(os.environ) == env, "events": events}))
"""


def test_import_accel_does_nothing() -> None:
    run = [sys.executable, "-B", "-c", _PROBE]
    seen = json.loads(
        subprocess.run(run, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    )
    assert "torch" not in seen["modules"]
    assert "megatron" not in seen["modules"]
    assert seen["environment"]
    assert seen["events"] == []
