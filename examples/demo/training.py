"""How the demo trains: one plan, two sides, one command line for each.

Both sides run the same ordinary script, ``examples/pretrain_gpt.py``, at the same time and take turns
every few iterations (``examples/take_turns.py``), so that both meet the same machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from corpus import Corpus

__all__ = [
    "QUICK",
    "RANKS",
    "REPOSITORY",
    "SIDES",
    "LaunchError",
    "Plan",
    "Side",
    "launch",
    "launch_both",
    "turn_flags",
]

REPOSITORY = Path(__file__).resolve().parents[2]

RANKS = 2
"""One process for each half of every matrix: tensor parallelism 2 with sequence parallelism."""


@dataclass(frozen=True)
class Side:
    """One of the two runs that are compared."""

    name: str
    flags: tuple[str, ...]
    what: str
    """For the report."""


SIDES = {
    "stock": Side(
        "stock",
        (
            *("--accel-preset", "off", "--accel-norm", "--accel-host-bf16-gemm"),
            *("--transformer-impl", "local", "--no-gradient-accumulation-fusion"),
        ),
        "stock Megatron-LM on accel's device runtime: only what makes it run here at all",
    ),
    "accel": Side("accel", (), "import accel.megatron_adaptor, nothing else (preset fast)"),
}


@dataclass(frozen=True)
class Plan:
    """Sizes and lengths; the defaults are the demo."""

    num_layers: int = 2
    hidden_size: int = 192
    ffn_hidden_size: int = 512
    num_heads: int = 4
    num_kv_heads: int = 2
    seq_length: int = 256
    batch_size: int = 4
    """Sequences for each iteration, all in one micro-batch."""
    iterations: int = 440
    turn_steps: int = 5
    """Iterations that one side trains before it hands over."""
    log_interval: int = 10
    """Iterations for each logged loss; Megatron logs the mean over them."""
    learning_rate: float = 2e-3

    @property
    def tokens_per_iteration(self) -> int:
        return self.batch_size * self.seq_length

    def model_flags(self, corpus: Corpus) -> list[str]:
        """The model, Llama-shaped: RMSNorm, SwiGLU, rotary embeddings, grouped queries, no biases."""
        return [
            *("--num-layers", str(self.num_layers)),
            *("--hidden-size", str(self.hidden_size)),
            *("--ffn-hidden-size", str(self.ffn_hidden_size)),
            *("--num-attention-heads", str(self.num_heads)),
            "--group-query-attention",
            *("--num-query-groups", str(self.num_kv_heads)),
            *("--seq-length", str(self.seq_length)),
            *("--max-position-embeddings", str(self.seq_length)),
            *("--normalization", "RMSNorm"),
            "--swiglu",
            *("--position-embedding-type", "rope"),
            "--disable-bias-linear",
            *("--attention-dropout", "0"),
            *("--hidden-dropout", "0"),
            "--bf16",
            *("--micro-batch-size", str(self.batch_size)),
            *("--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", str(corpus.tokenizer)),
            *("--make-vocab-size-divisible-by", "64"),
        ]

    def training_flags(self, corpus: Corpus, checkpoints: Path, index: Path) -> list[str]:
        """What is trained on what, and for how long."""
        return [
            *self.model_flags(corpus),
            *("--tensor-model-parallel-size", str(RANKS)),
            "--sequence-parallel",
            *("--data-path", str(corpus.prefix)),
            *("--data-cache-path", str(index)),
            *("--split", "100,0,0"),
            *("--eval-iters", "0"),
            *("--eval-interval", str(self.iterations)),  # not used, but divided by
            *("--global-batch-size", str(self.batch_size)),
            *("--train-iters", str(self.iterations)),
            *("--lr", str(self.learning_rate)),
            *("--min-lr", str(self.learning_rate / 10)),
            *("--lr-decay-style", "cosine"),
            *("--lr-warmup-iters", str(self.iterations // 20)),
            *("--weight-decay", "0.1"),
            *("--adam-beta2", "0.95"),
            *("--clip-grad", "1.0"),
            *("--save", str(checkpoints)),
            *("--save-interval", str(self.iterations)),
            *("--log-interval", str(self.log_interval)),
            *("--log-memory-interval", str(self.log_interval)),
        ]


QUICK = Plan(
    num_layers=2, hidden_size=64, ffn_hidden_size=128, iterations=20, turn_steps=2, log_interval=2
)
"""Shows that everything works, in a minute; learns nothing."""


class LaunchError(RuntimeError):
    """A launch ended with an error; the message holds the end of its log."""


def launch(
    script: Path,
    flags: Sequence[str],
    log: Path,
    *,
    ranks: int,
    threads: int = 1,
    on_line: Callable[[str], None] = lambda line: None,
    on_start: Callable[[subprocess.Popen[str]], None] = lambda process: None,
) -> float:
    """Run ``script`` under torchrun, with everything it prints in the file ``log``.

    Args:
        ranks: number of processes.
        threads: of each process.
        on_line: is given every line as soon as it is printed.
        on_start: is given the process, to end it early.

    Returns:
        Wall-clock time in seconds, start of the processes included.

    Raises:
        LaunchError: the exit status is not 0.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), *flags]
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with (
        log.open("w") as out,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        on_start(process)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                out.write(line)
                on_line(line)
        except BaseException:
            process.terminate()  # torchrun ends its ranks before it exits
            raise
    if process.returncode != 0:
        raise LaunchError(_failure(log, process.returncode))
    return time.monotonic() - start


def turn_flags(side: str, folder: Path, steps: int) -> list[str]:
    """Of ``examples/take_turns.py``: "stock" and "accel" take turns in ``folder``; stock starts."""
    names = list(SIDES)
    other = names[1 - names.index(side)]
    first = ["--first"] if side == names[0] else []
    sides = ["--side", side, "--other", other, *first]
    return ["--turns", str(folder), *sides, "--turn-steps", str(steps)]


def launch_both(
    starts: Sequence[Callable[[Callable[[subprocess.Popen[str]], None]], object]],
) -> None:
    """Run several launches at once; the first that fails ends the others, and its error is raised.

    Args:
        starts: each calls :func:`launch` with the ``on_start`` that it is given.
    """
    running: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(len(starts)) as pool:
        futures = [pool.submit(start, running.append) for start in starts]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            for process in running:
                process.terminate()
            raise


def _failure(log: Path, status: int, num_lines: int = 30) -> str:
    """The end of what the ranks said; torchrun's own account of it comes last and explains nothing."""
    lines = log.read_text().splitlines()
    ends = [
        n for n, line in enumerate(lines) if "torch/distributed/elastic" in line and line[:1] == "E"
    ]
    tail = lines[: ends[0]] if ends else lines
    return "\n".join([*tail[-num_lines:], "", f"exit status {status}; the whole log: {log}"])
