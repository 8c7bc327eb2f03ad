"""``examples/pretrain_gpt.py``: what it cannot train on is refused, what it can reaches its datasets."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 31 --eval-iters 0"
)


@pytest.mark.parametrize("flag", ["--sft", "--dataloader-inter-document-masking"])
def test_data_that_it_does_not_have_is_refused(flag: str) -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *FLAGS.split(), flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"{flag}: this example has no such data")


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_pretrain_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flags_of_data_reach_the_datasets(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = tmp_path / "sizes.json"
    sizes.write_text(json.dumps({"a": [1, 2]}))
    same = {
        "path_to_cache": "cache",
        "mmap_bin_files": False,
        "multiple_validation_sets": True,
        "full_validation": True,
        "num_dataset_builder_threads": 3,
        "mid_level_dataset_surplus": 0.25,
        "allow_ambiguous_pad_tokens": True,
        "fast_cache_load": True,
        "defer_npy_index_mmap": True,
        "object_storage_cache_path": "object",
    }
    named = {
        "path_to_cache": "data_cache_path",
        "fast_cache_load": "dataloader_fast_cache_load",
        "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
    }
    args = SimpleNamespace(
        **{named.get(field, field): value for field, value in same.items()},
        per_dataset_sequences_path=str(sizes),
        mock_data=False,
        seed=5,
        seq_length=8,
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask_in_dataloader=False,
    )
    given: dict[str, Any] = {}
    monkeypatch.setattr(example, "get_args", lambda: args)
    monkeypatch.setattr(example, "build_tokenizer", lambda args: None)
    monkeypatch.setattr(example, "get_blend_and_blend_per_split", lambda args: (None, None))
    monkeypatch.setattr(example, "print_rank_0", lambda line: None)
    monkeypatch.setattr(example, "GPTDatasetConfig", lambda **fields: given.update(fields))

    class Builder:
        def __init__(self, *args: Any) -> None:
            pass

        def build(self) -> None:
            pass

    monkeypatch.setattr(example, "BlendedMegatronDatasetBuilder", Builder)
    example.train_valid_test_datasets_provider([1, 1, 1])
    assert {field: given[field] for field in same} == same
    assert given["sequences_per_dataset"] == {"a": [1, 2]}
