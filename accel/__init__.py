"""accel: makes an existing Megatron-LM training script faster, leaner and able to run on CUDA,
Ascend and CPU.

The one line is ``import accel.megatron_adaptor``. Programs without a command line call
:func:`enable`. Importing this package does nothing.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "status"]


def enable(**options: Any) -> dict[str, Any]:
    """Install the device runtime and apply features now.

    Can be called again with other options; the earlier set is undone first.

    Args:
        **options: ``preset`` (``off|exact|fast|max``, default ``fast``), ``strict``,
        ``allow_untested_megatron``, ``device`` (``auto|cpu|cuda|npu``), the name of any feature with
        ``True``, ``False`` or its value, and its other settings (``python -m accel features`` lists them).

    Returns:
        What :func:`status` returns.

    Raises:
        ValueError: unknown option, features that exclude each other, unsupported Megatron version.
        accel.patching.PatchError: a patch does not fit the installed Megatron; nothing was changed.
    """
    from accel.session import SESSION

    SESSION.enable(options)
    return SESSION.status()


def disable() -> None:
    """Undo everything that accel changed, device runtime included."""
    from accel.session import SESSION

    SESSION.disable()


def status() -> dict[str, Any]:
    """What is installed and active now: device, Megatron version, preset and one entry for each
    feature."""
    from accel.session import SESSION

    return SESSION.status()
