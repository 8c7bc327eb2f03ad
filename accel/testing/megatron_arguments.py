"""Megatron's command line, parsed again and again in one process."""

from __future__ import annotations

import functools


@functools.cache
def read_docstrings_once() -> None:
    """Megatron reads the help of its flags from the source of its configs each time that it parses
    them, a quarter of a run of the tests' size. Remember it, class by class."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    @functools.wraps(read)
    def docstrings(self: ArgumentGroupFactory, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(self, config)
        return dict(known[config])

    ArgumentGroupFactory._get_field_docstrings = docstrings
