"""What all parts know of this run: where it writes, on which device, and whether it is a rehearsal."""

import argparse
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "CHECKOUT",
    "PATHS",
    "PEAKS",
    "SITE",
    "WHEELS",
    "Setting",
    "read",
    "results",
    "short_name",
    "write_json",
]

CHECKOUT = Path(__file__).parents[2]
WHEELS = CHECKOUT / ".gpu-wheels"
"""Carried there; `make gpu-wheels` fills it where there is a network."""
SITE = CHECKOUT / "build" / "gpu-site"
"""Where the carried wheels are unpacked."""
PATHS = (CHECKOUT, SITE, SITE / "nvidia_cutlass_dsl" / "dsl_packages")
"""Of modules. The last is what a .pth file adds, which is read in site-packages alone."""

PEAKS = {"h100": 989.4e12, "h200": 989.4e12, "a100": 312e12, "b200": 2250e12}
"""FLOP/s of dense bf16 products by NVIDIA's datasheets (SXM); MFU refers to them by name."""


@dataclass(frozen=True)
class Setting:
    """One run of `make gpu`."""

    folder: Path
    """Where parts leave their results; kept between runs."""
    rehearse: bool
    """On the CPU, kernels interpreted, toy sizes."""
    seconds: float
    """How long this part may take."""
    started: float

    @classmethod
    def from_argv(cls, argv: list[str] | None = None) -> "Setting":
        """Of a part's command line."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--folder", type=Path, required=True)
        parser.add_argument("--rehearse", action="store_true")
        parser.add_argument("--seconds", type=float, required=True)
        args = parser.parse_args(argv)
        return cls(args.folder, args.rehearse, args.seconds, time.monotonic())

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    @property
    def machine(self) -> str:
        """A short name of the device: h100, h200, ..., or "rehearsal"."""
        return "rehearsal" if self.rehearse else short_name(torch.cuda.get_device_name())


def short_name(device: str) -> str:
    """ "h200" of "NVIDIA H200", "rtx-4090" of "NVIDIA GeForce RTX 4090"."""
    words = re.sub(r"\b(nvidia|geforce)\b", "", device.lower())
    found = re.search(r"\b[a-z]{1,3}\d{2,4}\b", words)
    return found[0] if found else "-".join(re.findall(r"\w+", words))


def results() -> Path:
    """Where the results of this machine's GPU are kept."""
    return CHECKOUT / "benchmarks" / "results" / short_name(torch.cuda.get_device_name())


def read(file: Path) -> Any:
    """The JSON of a file, or None where its part has not come so far."""
    return json.loads(file.read_text()) if file.exists() else None


def write_json(file: Path, value: Any) -> None:
    """Whole or not at all: a part may be killed while it writes."""
    scratch = file.with_suffix(".tmp")
    scratch.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(scratch, file)
