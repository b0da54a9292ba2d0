"""Train a byte-level GPT as a pipeline of four stages; with more ranks, as several pipelines side by side.

python -m torch.distributed.run --standalone --nproc-per-node 4 examples/pipeline.py
python -m torch.distributed.run --standalone --nproc-per-node 4 examples/pipeline.py --schedule zbv --ranks 2
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import zerofx

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 256, 64, 128, 4, 8
MICRO_BATCHES, ROWS = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """An ordinary model: nothing in it knows of stages. Its head is the embedding of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def draw(text: torch.Tensor, rows: int, numbers: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - CONTEXT, (rows,), generator=numbers).tolist()
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks of one pipeline")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, zbv, ...: see zerofx.Pipeline")
    parser.add_argument("--stage", type=int, default=1, help="the ZeRO stage between pipelines side by side")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backend", default="interpreter", help="inductor compiles the stages, which takes longer")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    stages = args.ranks * (1 if args.schedule in ("gpipe", "1f1b") else 2)
    pipeline = zerofx.Pipeline(stages, args.schedule, MICRO_BATCHES)
    replicas = dist.get_world_size() // args.ranks
    example = ((torch.zeros(ROWS, CONTEXT, dtype=torch.long),), {})
    model = zerofx.compile(GPT(), stage=args.stage, pipeline=pipeline, example_inputs=example, backend=args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)  # those of this rank's stages
    step = zerofx.train_step(model, loss_fn, optimizer, clip=1.0)
    report = zerofx.pipeline_report(model)
    if dist.get_rank() == 0:
        print(report, report.gantt(), sep="\n")

    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    numbers = torch.Generator().manual_seed(dist.get_rank() % replicas)  # ranks of a pipeline get the same batch
    for number in range(args.steps):
        result = step(*draw(text, MICRO_BATCHES * ROWS, numbers))
        if dist.get_rank() == 0 and (number % 5 == 4 or number == 0):
            print(f"step {number + 1}: loss {result.loss.item():.3f} nats, norm {result.grad_norm.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
