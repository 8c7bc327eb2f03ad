"""The process that writes checkpoints gets the device, wherever the program enables accel."""

from __future__ import annotations

import json
import os
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel.device import Device
from accel.feature import Context
from accel.patches import checkpoint_worker
from accel.patching import Applied
from accel.session import SESSION
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import installed, output_with

SECONDS = 600
"""For a process to start and write: many times what it needs."""


def say_what_is_on(path: str) -> None:
    """What the worker is asked to write."""
    import accel

    status = accel.status()
    Path(path).write_text(json.dumps([status["device"], bool(status["patches"])]))


def check(started: str, features: bool = False) -> None:
    """Megatron's queue has something written, by a worker that starts with the training or with the first
    checkpoint."""
    import torch
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        AsyncCallsQueue,
        AsyncRequest,
        PersistentAsyncCaller,
    )

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    calls = AsyncCallsQueue(persistent=True)
    if started == "first":
        calls.warmup_persistent_caller(0, "forkserver")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "said")
        calls.schedule_async_request(AsyncRequest(say_what_is_on, (path,), []))
        caller = PersistentAsyncCaller
        ready = wait(
            [caller._persistent_process.sentinel, caller._persistent_comp_q._reader], SECONDS
        )
        wrote = ready == [caller._persistent_comp_q._reader]
        if not wrote:
            calls.close(abort=True)
        assert wrote, "the worker has ended, or hangs"
        assert calls.maybe_finalize_async_calls(blocking=True) == [0]
        assert json.loads(Path(path).read_text()) == ["cpu", features]
    calls.close()
    torch.distributed.destroy_process_group()


INSIDE = """
import tests.patches.test_checkpoint_worker as test

def main():
    import accel
    accel.enable(preset="off", device="cpu")
    test.check("{started}")

if __name__ == "__main__":
    main()
"""
AT_TOP = """
import accel.megatron_adaptor
import tests.patches.test_checkpoint_worker as test

if __name__ == "__main__":
    import accel
    accel.enable(preset="off")
    test.check("first")
"""
ENABLED_AT_TOP = """
import accel
accel.enable(preset="off")
import tests.patches.test_checkpoint_worker as test

if __name__ == "__main__":
    test.check("first", features=True)
"""


def run(version: str, program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the main module, which the worker runs again under another name."""
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    file = folder / "program.py"
    file.write_text(program)
    output_with(version, f"import runpy; runpy.run_path({os.fspath(file)!r}, run_name='__main__')")


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_a_worker_of_a_program_that_enables_accel_in_a_function_writes(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = "late" if version == installed() else "first"
    run(version, INSIDE.format(started=started), tmp_path, monkeypatch)


@pytest.mark.parametrize("program", [AT_TOP, ENABLED_AT_TOP], ids=["import", "enable"])
def test_a_worker_whose_main_module_brings_accel_is_left_as_it_is(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(installed(), program, tmp_path, monkeypatch)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_the_worker_gets_the_device_of_the_training(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SESSION, "device", Device(device, "asked for", lambda audience: Applied()))
    loop = checkpoint_worker.with_device(lambda *args: None)
    assert loop is getattr(checkpoint_worker, f"on_{device}")
    assert (loop.__module__, loop.__qualname__) == (checkpoint_worker.__name__, f"on_{device}")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (None, None),
        ({"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}, None),
        (
            {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "nvrx"},
            "--async-strategy nvrx has a worker of its own",
        ),
        (
            {"async_save": True, "use_persistent_ckpt_worker": False},
            "--use-persistent-ckpt-worker is not given",
        ),
        (
            {"async_save": False, "use_persistent_ckpt_worker": True},
            "--async-save is not given",
        ),
    ],
)
def test_where_it_is_idle(args: dict | None, reason: str | None) -> None:
    given = None if args is None else SimpleNamespace(**args)
    assert checkpoint_worker.FEATURE.idle(Context("cpu", "0.19.2", given)) == reason
