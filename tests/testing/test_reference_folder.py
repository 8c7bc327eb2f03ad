"""Under torchrun: a folder for the reference runs that all ranks share, and that no other session finds."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = """
import os
from pathlib import Path

def test_folder():
    folder = os.environ["ACCEL_TEST_REFERENCE"]
    assert Path(folder).is_dir()
    Path(os.environ["TOLD"], os.environ["RANK"]).write_text(folder)
"""


def test_ranks_share_a_fresh_folder(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TEST)
    others = ("ACCEL_TEST_REFERENCE", "PYTEST_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    environment |= {"TOLD": str(tmp_path), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["-q", "-p", "accel.testing.distributed", "-p", "tests.conftest", "-c", os.devnull]
    done = subprocess.run(
        [*command, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folders = {(tmp_path / str(rank)).read_text() for rank in range(2)}
    assert len(folders) == 1
    (folder,) = folders
    assert Path(folder).parent == tmp_path
    assert not Path(folder).exists()  # the last rank has removed it
