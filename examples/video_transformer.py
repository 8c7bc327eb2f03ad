"""A toy video transformer, its sequences split over ranks: it learns to take noise out of clips and images.

    python examples/video_transformer.py
    torchrun --standalone --nproc-per-node 2 examples/video_transformer.py

Blocks attend within a frame and over time by turns. In between, `switch_blocks` hands each rank the tokens
that its next block needs. The losses do not depend on the number of ranks, but for rounding.

Letters     B  clips of one size, T  frames, S  patches of a frame, P  pixels of a patch, H  hidden, W  words;
            rows  frames (spatial blocks) or places (temporal blocks) of this rank
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from accel.parallel.context.spatio_temporal import Clips, gather_clips, split_clips, switch_blocks

SIDE, PATCH = 12, 4
HIDDEN, HEADS, WORDS, DEPTH = 32, 4, 3, 2
PLACES = (SIDE // PATCH) ** 2
BATCH = [Clips(batch=2, time=5, space=PLACES), Clips(batch=2, time=1, space=PLACES)]
"""Two clips of five frames, and two images."""
KINDS = ("spatial", "temporal")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key_value = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.query(x), *self.key_value(seen).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention within the rows, whatever they are; then the text; then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention, self.text_attention = Attention(), Attention()
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )
        self.modulation = nn.Linear(HIDDEN, 4 * HIDDEN)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """`x` [rows, T or S, H], `time` [rows, H], `text` [rows, W, H]."""
        scale, shift, scale_mlp, shift_mlp = self.modulation(time).unsqueeze(1).chunk(4, -1)
        normed = self.norm(x) * (1 + scale) + shift
        x = x + self.attention(normed, normed)
        x = x + self.text_attention(self.norm(x), text)
        return x + self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)


class VideoTransformer(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.embed_patch = nn.Linear(3 * PATCH**2, HIDDEN)
        self.frame = nn.Parameter(torch.randn(max(c.time for c in BATCH), 1, HIDDEN) / 10)
        self.place = nn.Parameter(torch.randn(PLACES, HIDDEN) / 10)
        self.embed_time = nn.Sequential(
            nn.Linear(1, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU()
        )
        self.embed_word = nn.Embedding(10, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2 * DEPTH))
        self.to_patch = nn.Linear(HIDDEN, 3 * PATCH**2)

    def forward(self, x: list[Tensor], time: list[Tensor], words: list[Tensor]) -> list[Tensor]:
        """Of each size `x` [B, T, S, P], `time` [B, 1], `words` [B, W], the same on every rank."""
        sides = [[self.embed_time(t) for t in time], [self.embed_word(w) for w in words]]
        beside = {kind: [self.own_rows(side, kind) for side in sides] for kind in KINDS}
        x = list(map(self.own_tokens, x, BATCH))
        for i, block in enumerate(self.blocks):
            kind = KINDS[i % 2]
            if i:
                x = switch_blocks(x, BATCH, self.group, to=kind)
            x = list(map(block, x, *beside[kind]))
        return [
            gather_clips(self.to_patch(tokens), clips, self.group, block=kind)
            for tokens, clips in zip(x, BATCH, strict=True)
        ]

    def own_rows(self, sides: list[Tensor], kind: str) -> list[Tensor]:
        """[B, ...] -> [rows, ...]"""
        return [
            split_clips(side, clips, self.group, block=kind, per="clip")
            for side, clips in zip(sides, BATCH, strict=True)
        ]

    def own_tokens(self, patches: Tensor, clips: Clips) -> Tensor:
        """[B, T, S, P] -> [rows, S, H]"""
        own = split_clips(patches, clips, self.group, block="spatial")
        positions = (self.frame[: clips.time] + self.place).expand(clips.batch, -1, -1, -1)
        return self.embed_patch(own) + split_clips(positions, clips, self.group, block="spatial")


def videos(clips: Clips, generator: torch.Generator) -> Tensor:
    """[B, T, S, P]: coloured waves that wander through the frame, cut into patches."""
    slope, speed, phase = torch.rand(3, clips.batch, 3, 1, 1, 1, generator=generator)
    t, y, x = torch.meshgrid(*(torch.arange(n) for n in (clips.time, SIDE, SIDE)), indexing="ij")
    pixels = torch.sin(slope * x + (1 - slope) * y + speed * t + 2 * math.pi * phase)
    patches = pixels.unflatten(-2, (-1, PATCH)).unflatten(-1, (-1, PATCH))  # [B, 3, T, y, p, x, p]
    return patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(2, 3)


def train_step(
    model: VideoTransformer, optimizer: torch.optim.Optimizer, clean: list[Tensor], seed: int
) -> float:
    generator = torch.Generator().manual_seed(seed)  # the same noise on every rank
    time = [torch.rand(c.batch, 1, generator=generator) for c in BATCH]
    words = [torch.arange(c.batch * WORDS).view(c.batch, WORDS) for c in BATCH]
    to_noise = [torch.randn(x.shape, generator=generator) - x for x in clean]
    noisy = [x + t.view(-1, 1, 1, 1) * way for x, t, way in zip(clean, time, to_noise, strict=True)]
    found = model(noisy, time, words)
    errors = [(f - way).square().flatten() for f, way in zip(found, to_noise, strict=True)]
    loss = torch.cat(errors).mean()  # of the whole batch, the same on every rank
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():  # each rank has found its share
        dist.all_reduce(parameter.grad, group=model.group)
    optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_default_dtype(getattr(torch, options.dtype))
    torch.manual_seed(0)
    model = VideoTransformer(dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    clean = [videos(clips, generator) for clips in BATCH]
    for step in range(options.steps):
        loss = train_step(model, optimizer, clean, step)
        if dist.get_rank() == 0:
            print(f"step {step + 1:3d}  loss {loss:.12g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
