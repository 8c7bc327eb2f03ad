"""Scripts run one after the other, each as the only rank of a process that has its libraries imported.

The processes are forks of a server that has imported PyTorch and what else takes seconds to read, and has
touched no GPU: `fork` keeps both. Megatron-LM and accel are imported by the script, in its own order.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ScriptError", "run_script"]

PRELOADED = ("torch", "torch._dynamo", "transformers", "omegaconf", "scipy.optimize")
LAST_LINES = 30

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))


class ScriptError(RuntimeError):
    """A script ended with another exit code than 0; the message has the end of its log."""


def run_script(script: Path, flags: Sequence[str], log: Path, threads: int) -> None:
    """Run `script` with these flags; what it and its children print goes into `log`.

    Raises:
        ScriptError: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process = _context.Process(target=_run, args=(str(script), list(flags), str(log), threads))
    process.start()
    process.join()
    if process.exitcode != 0:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        end = "\n".join(lines[-LAST_LINES:])
        raise ScriptError(f"{script.name} ended with exit code {process.exitcode}:\n{end}")


def _run(script: str, flags: list[str], log: str, threads: int) -> None:
    """In the fork: become the script."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        **{"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        "OMP_NUM_THREADS": str(threads),
    }
    import torch

    torch.set_num_threads(threads)  # the server has read OMP_NUM_THREADS
    multiprocessing.set_start_method(None, force=True)  # of data loaders: the script's choice again
    sys.argv = [script, *flags]
    sys.path.insert(0, os.path.dirname(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
