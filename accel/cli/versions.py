"""Compare version numbers without ``packaging``: the doctor runs where it is missing."""

from __future__ import annotations

import re

__all__ = ["at_least"]


def at_least(version: str | None, oldest: str) -> bool | None:
    """Compare release numbers; ``None`` if there is no version, or none that can be read.

    Local and pre-release parts do not count: NVIDIA's containers call their builds 2.11.0a0+<hash>.

    >>> at_least("2.10.0a0+nv", "2.10"), at_least("2.9.1+cpu", "2.10"), at_least("main", "1")
    (True, False, None)
    """
    have, want = _release(version or ""), _release(oldest)
    if have is None or want is None:
        return None
    length = max(len(have), len(want))
    return have + [0] * (length - len(have)) >= want + [0] * (length - len(want))


def _release(version: str) -> list[int] | None:
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    return [int(part) for part in found[1].split(".")] if found else None
