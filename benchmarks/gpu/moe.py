"""Part moe: a DeepSeekMoE-shaped GPT on one GPU, stock Megatron-LM beside preset fast with grouped products.

Layers of DeepSeekMoE 16B (Dai et al. 2024, arXiv:2401.06066; hidden 2048, 16 heads, 64 experts of 1408 of
which a token has 6, and 2 shared ones), as few as make a step. Without Transformer Engine stock multiplies
one expert after the other.

    model FLOPs   as in part training; of the experts those that a token has
"""

import sys
from dataclasses import dataclass

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.training import SIDES, Llama, train_sides

COMMON = ("--moe-router-load-balancing-type", "none")
MOE_SIDES = {
    "stock": (*SIDES["stock"], *COMMON),
    "accel fast": (*SIDES["accel fast"], *COMMON, "--moe-grouped-gemm", "--moe-permute-fusion"),
}


@dataclass(frozen=True)
class Moe(Llama):
    """`Llama` whose feed-forward layers are experts of `ffn_hidden_size`."""

    experts: int = 64
    topk: int = 6
    shared: int = 2
    """Experts that every token has."""

    def megatron_flags(self) -> list[str]:
        values = {
            "num-experts": self.experts,
            "moe-router-topk": self.topk,
            "moe-ffn-hidden-size": self.ffn_hidden_size,
            "moe-shared-expert-intermediate-size": self.shared * self.ffn_hidden_size,
            "moe-token-dispatcher-type": "alltoall",
        }
        flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        return [*super().megatron_flags(), *flags]

    @property
    def parameters(self) -> tuple[int, int]:
        """Of what a token is multiplied by, and of the embedding's table."""
        h, f = self.hidden_size, self.ffn_hidden_size
        kv = h * self.num_kv_heads // self.num_heads
        experts = 3 * h * f * (self.topk + self.shared)
        layer = 2 * h * h + 2 * h * kv + experts + self.experts * h + 2 * h
        table = self.vocab_size * h
        return self.num_layers * layer + h + table, table


DEEPSEEK = Moe(
    "DeepSeekMoE 16B, 4 layers",
    *(4, 2048, 1408, 16, 16),
    seq_length=4096,
    micro_batch_size=1,
    vocab_size=102399,
    ranks=1,
    threads=8,
    min_speedup=None,
    steps=12,
    flags=("--untie-embeddings-and-output-weights",),
)
TOY = Moe(
    "toy experts",
    *(1, 64, 32, 4, 4),
    seq_length=64,
    micro_batch_size=1,
    vocab_size=255,
    ranks=1,
    threads=1,
    min_speedup=None,
    steps=6,
    flags=("--untie-embeddings-and-output-weights",),
    experts=8,
    topk=2,
)


def main() -> int:
    setting = Setting.from_argv()
    return train_sides(MOE_SIDES, TOY if setting.rehearse else DEEPSEEK, setting, "moe")


if __name__ == "__main__":
    sys.exit(main())
