"""The options of process groups on Ascend are HCCL's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from accel.patches.hccl_options import options_of_hccl


class Options:
    """As HCCL's: made without arguments."""

    is_high_priority_stream = False


@pytest.fixture(autouse=True)
def hccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


def upstream(pg_name: str, nccl_comm_cfgs: dict[str, Any]) -> Any:
    raise TypeError("Options(): incompatible constructor arguments")


def test_the_priority_is_kept() -> None:
    options = options_of_hccl(upstream)
    configs = {"dp_cp": {"is_high_priority_stream": True}, "tp": {}}
    found = options("dp_cp", configs)
    assert isinstance(found, Options)
    assert found.is_high_priority_stream
    assert not options("tp", configs).is_high_priority_stream
    assert options("pp", configs) is None


def test_what_is_nccls_own_is_an_error() -> None:
    with pytest.raises(ValueError, match="cga_cluster_size, max_ctas of 'dp' is for NCCL alone"):
        options_of_hccl(upstream)("dp", {"dp": {"max_ctas": 32, "cga_cluster_size": 4}})
