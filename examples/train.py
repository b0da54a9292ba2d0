"""Train a byte-level GPT on the Python language reference, sharded over all ranks by zerofx.

python examples/train.py                                                  one process
python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train.py     two ranks, CPUs or GPUs

With --checkpoints FOLDER it saves as it goes and takes itself up from the newest checkpoint there, also where torchrun
starts it again (--max-restarts 3), on as many ranks as there are.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import zerofx

VOCAB = 256
CLIP = 1.0
LINE_SECONDS = 10.0


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    context: int


SIZES = {
    "tiny": Size(layers=2, width=64, heads=4, context=64),
    "small": Size(layers=3, width=128, heads=4, context=64),
    "medium": Size(layers=8, width=512, heads=8, context=256),
    "large": Size(layers=12, width=768, heads=12, context=512),
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if residual else 0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Text:
    """The corpus as bytes, split 95 to 5; every rank reads its own rows of one global batch."""

    def __init__(self, context: int, rows: int, seed: int, device: torch.device) -> None:
        paragraphs = "\n\n".join(topics.values()).split("\n\n")
        text = "\n\n".join(dict.fromkeys(paragraphs))  # topics repeat each other: without this the split would leak
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        cut = int(0.95 * len(data))
        self.training, self.held_out = data[:cut], data[cut:]
        self.context, self.rows, self.device = context, rows, device
        self.generator = torch.Generator().manual_seed(seed)

    def _windows(self, data: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.stack([data[start : start + self.context + 1] for start in starts.tolist()]).to(self.device)
        return window[:, :-1], window[:, 1:]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next random training batch."""
        last = len(self.training) - self.context
        starts = torch.randint(last, (WORLD, self.rows), generator=self.generator)
        return self._windows(self.training, starts[RANK])

    def held_out_windows(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Consecutive held-out windows, one at a time, as many on every rank."""
        starts = torch.arange(0, len(self.held_out) - self.context, self.context)
        for some in starts.split(WORLD):
            if len(some) == WORLD:
                yield self._windows(self.held_out, some[RANK : RANK + 1])


class Meter:
    """Progress on rank 0: a bar on a terminal, else a line every LINE_SECONDS."""

    def __init__(self, console: Console, device: torch.device, steps: int, tokens_per_step: int) -> None:
        self.console, self.device, self.steps, self.tokens_per_step = console, device, steps, tokens_per_step
        self.step, self.time = 0, time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("compiling", total=steps)
        self.console.print("The first step compiles, which takes a while.")

    def update(self, step: int, loss: float) -> None:
        seconds = time.monotonic() - self.time
        if step == 1:
            self.console.print(f"The first step took {seconds:.1f} s.")
        elif seconds < LINE_SECONDS and step < self.steps and not self.console.is_terminal:
            return
        rate = (step - self.step) / seconds
        status = f"loss {loss:.3f}, {rate * self.tokens_per_step:,.0f} tokens/s, {memory(self.device)} per rank"
        self.step, self.time = step, time.monotonic()
        self.bar.update(self.task, completed=step, description=status)
        if not self.console.is_terminal and step > 1:
            left = time.strftime("%H:%M:%S", time.gmtime((self.steps - step) / rate))
            self.console.print(f"step {step}/{self.steps}: {status}, {left} left")


def choose_device() -> torch.device:
    """A GPU of the rank's own when every rank of the machine can have one, else the CPU."""
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def memory(device: torch.device) -> str:
    """The most memory this rank has held: resident on CPUs, allocated on GPUs."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB"
    unit = 1 if sys.platform == "darwin" else 2**10
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:,.0f} MiB"


def loss_of(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(ids)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def optimizer_of(
    model: nn.Module, steps: int, lr: float
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, and its rate: up over a twentieth of the steps, then down to a tenth."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    warm = max(1, steps // 20)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=warm)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warm), 0.1 * lr)
    return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warm])


def train(model: nn.Module, text: Text, arguments: argparse.Namespace, console: Console) -> None:
    optimizer, schedule = optimizer_of(model, arguments.steps, arguments.lr)
    meter = Meter(console, text.device, arguments.steps, arguments.batch * text.context)
    train_step = zerofx.train_step(model, loss_of, optimizer, clip=CLIP, scheduler=schedule)
    folder: Path | None = arguments.checkpoints
    start = 0
    if folder is not None and (newest := zerofx.latest(folder)):
        saved = zerofx.load(newest, model, optimizer, scheduler=schedule, loss_scale=train_step)
        text.generator.set_state(saved.extra["data"])
        start = meter.step = saved.step or 0
        console.print(f"Taken up at step {start}, from {newest}.")
    losses: list[torch.Tensor] = []
    with meter.bar:
        for step in range(start + 1, arguments.steps + 1):
            losses.append(train_step(*text.batch()).loss)
            if folder is not None and (step % arguments.every == 0 or step == arguments.steps):
                state = {"step": step, "extra": {"data": text.generator.get_state()}}
                of_step = {"scheduler": schedule, "loss_scale": train_step, "overwrite": True, "keep": 2}
                zerofx.save(folder / f"step-{step}", model, optimizer, **state, **of_step)
            if step % 10 in (0, 1) or step == arguments.steps:
                meter.update(step, torch.stack(losses).mean().item())
                losses.clear()


def evaluate(model: nn.Module, text: Text) -> float:
    eval_step = zerofx.eval_step(model, loss_of)
    return torch.stack([eval_step(*window) for window in text.held_out_windows()]).mean().item()


@torch.no_grad()
def generate(model: nn.Module, prompt: str, length: int, context: int, device: torch.device, seed: int) -> str:
    """Continue `prompt`; all ranks draw the same bytes, since every forward gathers the weights from all of them."""
    generator = torch.Generator().manual_seed(seed)
    output = list(prompt.encode())
    for _ in range(length):
        window = output[-context:]
        ids = torch.tensor([window + [0] * (context - len(window))], device=device)  # one shape: nothing recompiles
        logits = model(ids)[0, len(window) - 1].float().cpu()
        likely = logits.topk(40)
        choice = torch.multinomial(F.softmax(likely.values / 0.8, dim=0), 1, generator=generator)
        output.append(int(likely.indices[choice]))
    return bytes(output).decode(errors="replace")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3), help="0 shards nothing, 3 everything")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, over all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "interpreter", "eager"))
    parser.add_argument("--checkpoints", type=Path, help="a folder to save to and to be taken up from")
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    arguments = parser.parse_args()
    if arguments.every < 1:
        parser.error(f"--every {arguments.every} is no number of steps: pass at least 1")
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps} trains nothing: pass at least 1")
    if arguments.batch < 1 or arguments.batch % WORLD:
        parser.error(
            f"--batch {arguments.batch} cannot be split over {WORLD} rank(s): pass a positive multiple of {WORLD}"
        )
    return arguments


def main() -> None:
    arguments = parse()
    console = Console(quiet=RANK != 0, highlight=False, soft_wrap=True)
    device = choose_device()
    torch.manual_seed(arguments.seed)
    size = SIZES[arguments.size]
    text = Text(size.context, arguments.batch // WORLD, arguments.seed, device)
    model = GPT(size).to(device)
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{count / 1e6:.2f}M parameters, {len(text.training):,} bytes of text, {WORLD} rank(s) on {device.type}"
    )

    model = zerofx.compile(model, stage=arguments.stage, backend=arguments.backend)
    start = time.monotonic()
    train(model, text, arguments, console)
    console.print(f"Trained in {time.monotonic() - start:.0f} s.")

    model.eval()
    console.print("Evaluating, which compiles once more.")
    loss = evaluate(model, text)
    console.print(f"Held-out loss: {loss:.3f} nats, {loss / math.log(2):.3f} bits per byte.")
    sample = generate(model, "The ", 400, size.context, device, arguments.seed)
    console.print(f"Sample:\n{sample}", markup=False)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
