"""A pass of your own: parameters travel as int8 with a scale for each row, a quarter of the bytes of float32.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/custom_pass.py

trains a small model with the pass and without, and prints what each rank sends and how far the losses are apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

import zerofx
from zerofx.edit import Replacement
from zerofx.manager import Pass
from zerofx.program import Invariant, Level, Program, source, tag

aten, prims, c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional
LEVELS = 127
SCALE_BYTES = 4


@dataclass(frozen=True)
class QuantizeAllGathers:
    """Each row of a chunk is sent as int8 behind one float32 scale: what is read is off by at most max|row| / 254.

    A row is what one index of the chunk's first dim holds. Rows of fewer than `columns` elements travel as they are.
    The gradient is that of the rounded parameter, and is given to the stored one (a straight-through estimator).
    """

    name: ClassVar[str] = "quantize-all-gathers"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.GATHERED, Invariant.WAITED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset()
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "changes"

    columns: int = 16

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            for gather in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
                known, chunk = tag(gather), source(gather).meta["val"]
                if known is None or known.role != "unshard" or not chunk.is_floating_point():
                    continue
                if chunk.dim() > 1 and chunk[0].numel() >= self.columns:
                    _quantize(gather)


def _quantize(gather: Node) -> None:
    """Puts pack, gather, wait and unpack in the place of a gather and its wait."""
    (wait,) = gather.users
    chunk, whole = source(gather), gather.meta["val"]
    new = Replacement(wait)
    sent = new.call(c10d.all_gather_into_tensor.default, _pack(new, chunk), *gather.args[1:])
    rows = _unpack(new, new.call(c10d.wait_tensor.default, sent), whole.dtype)
    new.finish(rows if whole.dim() == 2 else new.call(aten.view.default, rows, list(whole.shape)))
    gather.graph.erase_node(gather)


def _pack(new: Replacement, chunk: Node) -> Node:
    """int8[rows, columns + 4]: the rounded row, and the four bytes of its scale."""
    value = chunk.meta["val"]
    rows = chunk if value.dim() == 2 else new.call(aten.view.default, chunk, [value.shape[0], value[0].numel()])
    if value.dtype is not torch.float32:
        rows = new.call(prims.convert_element_type.default, rows, torch.float32)
    largest = new.call(aten.amax.default, new.call(aten.abs.default, rows), [1], True)
    scale = new.call(aten.clamp_min.default, largest, torch.finfo(torch.float32).tiny * LEVELS)
    scale = new.call(aten.div.Tensor, scale, float(LEVELS))
    levels = new.call(aten.round.default, new.call(aten.div.Tensor, rows, scale))
    numbers = new.call(prims.convert_element_type.default, levels, torch.int8)
    return new.call(aten.cat.default, [numbers, new.call(aten.view.dtype, scale, torch.int8)], 1)


def _unpack(new: Replacement, packed: Node, dtype: torch.dtype) -> Node:
    width = packed.meta["val"].shape[1] - SCALE_BYTES
    numbers = new.call(aten.slice.Tensor, packed, 1, 0, width)
    scale = new.call(aten.slice.Tensor, packed, 1, width, width + SCALE_BYTES)
    scale = new.call(aten.clone.default, scale, memory_format=torch.contiguous_format)
    scale = new.call(aten.view.dtype, scale, torch.float32)
    rows = new.call(prims.convert_element_type.default, numbers, torch.float32)
    rows = new.call(aten.mul.Tensor, rows, scale)
    return rows if dtype is torch.float32 else new.call(prims.convert_element_type.default, rows, dtype)


def quantized(order: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """The default passes with this one behind the all-gathers, before these are put into buckets."""
    place = [step.name for step in order].index("insert-all-gather") + 1
    return (*order[:place], QuantizeAllGathers(), *order[place:])


def error_bound(weight: torch.Tensor) -> torch.Tensor:
    """How far each element of a matrix that is cut on dim 0 may be from what is read, row by row."""
    return weight.detach().abs().flatten(1).amax(1, keepdim=True) / (2 * LEVELS)


def model_of_seed(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def train(steps: int, backend: str, **options: object) -> tuple[list[float], int]:
    """The losses of a few steps, and the bytes that each rank sends in one."""
    model = zerofx.compile(model_of_seed(), persist_below=1_000, backend=backend, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = zerofx.train_step(model, lambda net, x: F.mse_loss(net(x), x), optimizer)
    numbers = torch.Generator().manual_seed(dist.get_rank())
    losses = [step(torch.randn(32, 64, generator=numbers)).loss.item() for _ in range(steps)]
    return losses, zerofx.inspect(model).collectives().bytes_sent


def main() -> None:
    dist.init_process_group("gloo")
    exact, whole_bytes = train(20, "inductor")
    rounded, sent = train(20, "inductor", passes=quantized)
    if dist.get_rank() == 0:
        print(f"float32: loss {exact[0]:.4f} to {exact[-1]:.4f}, each rank sends {whole_bytes:,} bytes a step")
        print(f"int8:    loss {rounded[0]:.4f} to {rounded[-1]:.4f}, each rank sends {sent:,} bytes a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
