"""``python -m accel doctor``: what is installed here, what is wrong with it, how to fix it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from accel.cli import tables
from accel.cli.facts import Facts, Found, collect
from accel.cli.findings import Finding, examine
from accel.cli.parser import Parser

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    args = Parser("doctor").parse(argv)
    facts = collect()
    findings = examine(facts)
    healthy = all(finding.level != "error" for finding in findings)
    if args.json:
        report = {
            "ok": healthy,
            **asdict(facts),
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        rows = [{"part": part, "found": found} for part, found in _table(facts).items()]
        tables.show(rows, (("part",), ("found",)))
        print()
        print("\n".join(map(_lines, findings)) or "ok: nothing to fix")
    return 0 if healthy else 1


def _table(facts: Facts) -> dict[str, str]:
    cpu, compiler = facts.cpu, facts.compiler
    features = ", ".join(
        f"{name} {'unknown' if there is None else 'yes' if there else 'no'}"
        for name, there in cpu.features.items()
    )
    return {
        "accel": _found(facts.accel),
        "python": _found(facts.python),
        "torch": _found(facts.torch),
        "megatron-core": _found(facts.megatron),
        **{
            module: _found(package) if package else "absent (not needed)"
            for module, package in facts.packages.items()
        },
        "native kernels": _found(facts.native),
        "cuda kernels": _found(facts.gpu),
        "device": _found(facts.device),
        "cpu": f"{cpu.model}: {cpu.physical_cores or 'unknown'} physical cores, "
        f"{cpu.usable_cpus} usable cpus, {cpu.memory_gib or 'unknown'} GiB; {features}",
        "compiler": compiler.version or f"{compiler.command} is missing or does not run",
    }


def _found(found: Found) -> str:
    if found.error or found.version is None:
        return found.error or "missing"
    return f"{found.version} ({found.detail})" if found.detail else found.version


def _lines(finding: Finding) -> str:
    return f"{finding.level}: {finding.what}\n  fix: {finding.fix}"
