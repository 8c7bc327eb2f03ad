"""Messages on the logger ``accel`` that are logged once, however often they come up."""

import functools
import logging

__all__ = ["log_once"]

_log = logging.getLogger("accel")


@functools.cache
def log_once(who: str, message: str, level: int = logging.WARNING) -> None:
    """Log a message once per process, for a feature, an op or a library by the name of `who`."""
    _log.log(level, "%s: %s", who, message)
