"""The one line: ``import accel.megatron_adaptor``, before the arguments are parsed.

At import the device runtime is installed and two functions of Megatron's are hooked: the one that
builds its argument parser and the one that validates the arguments. Features are applied when the
arguments are final. Programs without a command line call ``accel.enable(...)`` instead. Where a module
has a copy of these functions already, or the arguments are final, a warning says so.
"""

from __future__ import annotations

from accel.session import SESSION

SESSION.attach()
SESSION.warn_if_late()
