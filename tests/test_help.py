"""``--help`` of a training script."""

from __future__ import annotations

import argparse

import pytest

from accel.patches import FEATURES, command_line
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import output_with

MEGATRONS_HELP = """
import argparse
import accel.megatron_adaptor
from megatron.training import arguments
print(arguments.add_megatron_arguments(argparse.ArgumentParser()).format_help())
"""


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_megatrons_help_tells_of_every_flag(version: str) -> None:
    """Of 0.19.2 argparse cannot print one text as it is."""
    words = output_with(version, MEGATRONS_HELP).replace(",", " ").split()
    assert "--num-layers" in words
    assert {"--accel-preset", *(f.flag for f in FEATURES)} <= set(words)


def test_a_stray_percent_sign_is_printed() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--share", help="1.1 = 10%.", default=2)
    parser.add_argument("--sound", help="%(default)s, 10 %%", default=3)
    parser.add_argument("--bare")
    command_line._mend_help(parser)
    lines = [line.split() for line in parser.format_help().splitlines()]
    assert ["--share", "SHARE", "1.1", "=", "10%."] in lines
    assert ["--sound", "SOUND", "3,", "10", "%"] in lines
