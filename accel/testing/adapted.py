"""Runs a script of Megatron-LM's as it is, with accel on top, as if it had the line that a user adds.

python -m accel.testing.adapted SCRIPT [ARGUMENT ...]
"""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path

# "__mp_main__": a process that a rank spawns, such as the writer of checkpoints, has the line too
if __name__ in ("__main__", "__mp_main__"):
    importlib.import_module("accel.megatron_adaptor")


def main() -> None:
    assert isinstance(sys.stdout, io.TextIOWrapper)
    # a rank that is killed has printed what it had to say
    sys.stdout.reconfigure(line_buffering=True)
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    code = compile(script.read_text(), str(script), "exec", dont_inherit=True)
    # In this very module, whose copies of patched functions are rebound as a script's are; not by runpy, with
    # which a spawned process would import the script alone.
    names = vars(sys.modules["__main__"])
    names["__file__"] = str(script)
    exec(code, names)


if __name__ == "__main__":
    main()
