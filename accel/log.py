"""What is worth one line on the logger ``accel``, however often it comes up."""

import functools
import logging

__all__ = ["log_once"]

_log = logging.getLogger("accel")


@functools.cache
def log_once(who: str, message: str, level: int = logging.WARNING) -> None:
    """Say once what a feature, an op or a library does otherwise than one would think."""
    _log.log(level, "%s: %s", who, message)
