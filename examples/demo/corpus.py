"""The demo's data: the sources of this Python's own standard library, ready for Megatron.

    python examples/demo/corpus.py

Reads the ``.py`` files of the standard library (about 30 MB, nothing to download), trains a
byte-level BPE tokenizer on them, and writes

    .cache/demo/tokenizer/        for --tokenizer-type HuggingFaceTokenizer --tokenizer-model
    .cache/demo/stdlib.bin .idx   for --data-path: one document for each file, each ended by <|endoftext|>
    .cache/demo/manifest.json     what it was made from

A second run finds the manifest and returns at once. The folder is written under another name and
renamed at the end, so an interrupted run leaves nothing that looks complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

__all__ = ["CACHE", "END_OF_TEXT", "Corpus", "Recipe", "build", "python_files"]

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "demo"
END_OF_TEXT = "<|endoftext|>"

LEFT_OUT = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data"})
"""Folders of packages that pip installed, and of generated tables, which are not code."""

_FORMAT = 2  # raise it when the files below change, so that old ones are rebuilt
_FILES_PER_BATCH = 64


@dataclass(frozen=True)
class Recipe:
    """Everything that the data depends on."""

    source: str
    """Folder of ``.py`` files."""
    python: str
    """Its version: the same folder holds other files after an upgrade."""
    vocab_size: int = 2048
    """Entries of the tokenizer, bytes and ``<|endoftext|>`` included."""

    @staticmethod
    def of_this_python(vocab_size: int = 2048) -> Recipe:
        return Recipe(sysconfig.get_paths()["stdlib"], sys.version.split()[0], vocab_size)

    def digest(self) -> str:
        text = json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Finished data on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def prefix(self) -> Path:
        """``--data-path``: the name of the ``.bin`` and ``.idx`` files without their ending."""
        return self.folder / "stdlib"

    def __str__(self) -> str:
        m = self.manifest
        return (
            f"{m['num_files']:,} files of Python {m['recipe']['python']}'s standard library, "
            f"{m['num_bytes'] / 1e6:.1f} MB, {m['num_tokens']:,} tokens"
        )


def build(recipe: Recipe, folder: Path = CACHE) -> Corpus:
    """The corpus in ``folder``, made now unless it is there already.

    Raises:
        ValueError: ``recipe.source`` holds no readable Python file.
    """
    if (found := _finished(recipe, folder)) is not None:
        return found
    texts = list(_texts(python_files(Path(recipe.source))))
    if not texts:
        raise ValueError(f"no .py files below {recipe.source}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        num_tokens = _write(texts, recipe, unfinished)
        manifest = {
            "digest": recipe.digest(),
            "recipe": asdict(recipe),
            "num_files": len(texts),
            "num_bytes": sum(len(t.encode()) for t in texts),
            "num_tokens": num_tokens,
        }
        (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        unfinished.chmod(0o755)  # mkdtemp makes it private
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Corpus(folder, manifest)


def python_files(source: Path) -> list[Path]:
    """Every ``.py`` file below ``source``, without those in :data:`LEFT_OUT`, in one fixed order."""
    found = (p for p in source.rglob("*.py") if not LEFT_OUT & set(p.relative_to(source).parts))
    return sorted(found, key=lambda p: p.relative_to(source).as_posix())


def _finished(recipe: Recipe, folder: Path) -> Corpus | None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return Corpus(folder, manifest) if manifest.get("digest") == recipe.digest() else None


def _texts(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # the test suite holds files in other encodings, and some broken on purpose
        if text.strip():
            yield text


def _write(texts: Sequence[str], recipe: Recipe, folder: Path) -> int:
    """Train the tokenizer, save it, write ``.bin`` and ``.idx``; returns the number of tokens."""
    # Imported here: numpy, torch and transformers take seconds, a finished corpus needs none.
    with warnings.catch_warnings(action="ignore"):  # Megatron lists every package it does not find
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from transformers import PreTrainedTokenizerFast

    tokenizer = _train_tokenizer(texts, recipe.vocab_size)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(
        folder / "tokenizer"
    )
    end = tokenizer.token_to_id(END_OF_TEXT)
    corpus = Corpus(folder, {})
    builder = IndexedDatasetBuilder(f"{corpus.prefix}.bin", dtype=_token_type(recipe.vocab_size))
    num_tokens = 0
    batches = range(0, len(texts), _FILES_PER_BATCH)
    for start in _progress(batches, f"encoding {len(texts):,} files"):
        for encoded in tokenizer.encode_batch_fast(list(texts[start : start + _FILES_PER_BATCH])):
            ids = [*encoded.ids, end]
            builder.add_document(ids, [len(ids)])
            num_tokens += len(ids)
    builder.finalize(f"{corpus.prefix}.idx")
    return num_tokens


def _token_type(vocab_size: int) -> Any:
    import numpy as np

    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def _train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """Byte-level BPE, as GPT-2's: no unknown tokens, and decoding gives back the exact text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        _progress(texts, f"training a tokenizer of {vocab_size:,} entries"), trainer
    )
    return tokenizer


def _progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """A bar on a terminal, one line elsewhere."""
    if sys.stderr.isatty():
        return track(items, description=what)
    print(f"{what} (about 20 s)", flush=True)
    return items


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=CACHE, help="where to write (%(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    corpus = build(Recipe.of_this_python(), options.folder)
    print(f"{os.path.relpath(corpus.folder)}: {corpus}")


if __name__ == "__main__":
    main()
