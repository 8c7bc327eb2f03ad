"""Ascend: torch-npu redirects ``torch.cuda`` itself.

``torch_npu.contrib.transfer_to_npu`` is a module that patches ``torch.cuda`` when it is imported
and offers no way back, so :func:`install` cannot be undone; ``accel.disable()`` says so through the
returned object. Not run on hardware yet.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from accel.patching import Applied, PatchError


@dataclass
class _TransferToNpu(Applied):
    def undo(self) -> None:
        raise PatchError(
            "torch_npu.contrib.transfer_to_npu cannot be undone; start a new process without accel"
        )


def install(audience: Sequence[str]) -> Applied:
    """Import torch-npu and its redirect of ``torch.cuda``."""
    importlib.import_module("torch_npu")
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    return _TransferToNpu()
