"""Libraries that are not installed, in a process that asks for them: modules of names that are classes, so
that Megatron takes them for installed. Nothing of them computes."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch

VERSION = "2.12.0"
"""Of each, recent enough for what Megatron asks of Transformer Engine."""


class _Anything(type):
    """Of a class, and of what is found in it."""

    def __getattr__(cls, name: str) -> Any:
        return _found(cls, name)


def _found(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    found = _Anything(name, (torch.nn.Module,), {"__module__": owner.__name__})
    setattr(owner, name, found)
    return found


class _Module(types.ModuleType):
    __version__ = VERSION
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return _found(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, libraries: tuple[str, ...]) -> None:
        self.libraries = libraries

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.libraries:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(*libraries: str) -> None:
    """From now on ``import`` finds them."""
    sys.meta_path.insert(0, _Finder(libraries))
