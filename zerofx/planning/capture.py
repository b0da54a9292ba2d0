"""Captures a training step of a model of any depth: shapes only, no process group, repeated blocks a few times."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zerofx import _torch
from zerofx.check_model import find_owners, refuse_model
from zerofx.config import PRECISIONS, Config, ModelError
from zerofx.layout import Layout
from zerofx.passes.choose_layout import choose_layout
from zerofx.planning.repeats import Repeats, find_repeats
from zerofx.planning.tape import DepthError, Tape, tape_of
from zerofx.program import Program
from zerofx.trace import on_cpu, trace_made

DEPTHS = ((2, 3), (4, 5))
"""How many blocks are traced to find what one more adds; more where the first ones do not tell."""
WHOLE = 5
"""Models of no more blocks than that are traced whole."""


@dataclass(frozen=True)
class Asked:
    """What decides on the graphs of a step, beside the model: see `zerofx.plan`."""

    config: Config
    world: int
    backend: str
    loss_fn: Callable[..., Any] | None = None


class Shapes:
    """A model without data, its parameters, and the tapes of its step for any configuration and number of blocks.

    `repeats` are the model's equal blocks, and `blocks` how many there are; 0 where none are equal.
    """

    def __init__(self, model_fn: Callable[[], nn.Module], batch: Sequence[Any]) -> None:
        self.mode = _torch.fake_tensors()
        with self.mode, _NoData():
            self.model = model_fn()
            if not isinstance(self.model, nn.Module):
                raise ModelError(f"model_fn must return a torch.nn.Module, not {type(self.model).__name__}")
            refuse_model(self.model)
            self.inputs = tree_map_only(torch.Tensor, on_cpu, list(batch))
            tensors = (*self.model.parameters(), *self.model.buffers())
            if elsewhere := {str(tensor.device) for tensor in tensors} - {"cpu"}:
                raise ModelError(
                    f"model_fn made tensors on {', '.join(sorted(elsewhere))}: they have no data anyway, leave them on "
                    "cpu"
                )
            self.params = Layout(tuple(owner.layout for owner in find_owners(self.model, [])))
            self.repeats: Repeats | None = find_repeats(self.model)
            self.buffers = sum(buffer.nbytes for buffer in self.model.buffers())
        self.blocks = 0 if self.repeats is None else self.repeats.count
        self.tapes: dict[Any, Tape] = {}

    @property
    def elements(self) -> int:
        return sum(param.whole_bytes // param.dtype.itemsize for param in self.params)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of a micro-batch."""
        return [leaf for leaf in tree_leaves(self.inputs) if isinstance(leaf, torch.Tensor)]

    @property
    def most_traced(self) -> int:
        """The blocks of the largest model that was traced."""
        return max((key[-1] for key in self.tapes), default=0)

    def layout(self, asked: Asked) -> Layout:
        """How the parameters are stored."""
        if asked.world == 1:
            return self.params
        return choose_layout(self.params, asked.world, asked.config.stage, asked.config.persist_below)

    def tape(self, asked: Asked, blocks: int | None = None) -> Tape:
        """The tape of a micro-batch of the model, with that many of its blocks."""
        blocks = self.blocks if blocks is None else blocks
        if self.repeats is None or blocks <= WHOLE:
            return self._traced(asked, blocks)
        for fewer, more in DEPTHS:
            try:
                return self._traced(asked, fewer).deeper(self._traced(asked, more), blocks - fewer)
            except DepthError:
                continue
            except Exception:  # a forward may need all of its blocks; if the fault is another one, the whole has it too
                self.uncut()
                break
        return self._traced(asked, blocks)

    def uncut(self) -> None:
        """Takes the model as a whole from here on."""
        self.repeats, self.blocks = None, 0

    def program(self, asked: Asked, blocks: int) -> Program:
        """The program of a model with that many of its blocks."""
        with self.mode:
            model = self.copy_of(blocks)
            autocast = PRECISIONS[asked.config.precision] if asked.config.precision else None
            return trace_made(
                model,
                self.inputs,
                asked.config,
                asked.world,
                asked.backend,
                loss_fn=asked.loss_fn,
                autocast=autocast,
            )

    def _traced(self, asked: Asked, blocks: int) -> Tape:
        config = replace(asked.config, memory=None)
        key = (config, asked.world, asked.backend, asked.loss_fn, blocks)
        if key not in self.tapes:
            program = self.program(replace(asked, config=config), blocks)
            if "backward" not in program.graphs:
                raise ModelError(
                    "the step to plan has no backward: return a loss that depends on parameters, from the model or "
                    "from loss_fn(model, *batch)"
                )
            self.tapes[key] = tape_of(program)
        return self.tapes[key]

    def copy_of(self, blocks: int) -> nn.Module:
        """A model of its own with that many blocks."""
        left_out: set[nn.Module] = set()
        if self.repeats is not None and blocks < self.blocks:
            left_out = self.repeats.behind(self.model, blocks)
        known: dict[int, Any] = {id(module): nn.Identity() for module in left_out}
        for _, module in self.model.named_modules(memo=left_out):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in known:
                    made = on_cpu(tensor.detach())
                    own = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
                    known[id(tensor)] = own
        model = copy.deepcopy(self.model, known)
        if self.repeats is not None and blocks < self.blocks:
            self.repeats.keep(model, blocks)
        return model


class _NoData(TorchFunctionMode):
    """Skips what writes initial values into tensors that have no data, which takes most of the time of making them."""

    SKIPPED = frozenset(
        {
            torch.Tensor.normal_,
            torch.Tensor.uniform_,
            torch.Tensor.zero_,
            torch.Tensor.fill_,
            torch.Tensor.erfinv_,
            torch.Tensor.mul_,
            torch.Tensor.add_,
            torch.Tensor.clamp_,
        }
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.SKIPPED and isinstance(args[0], nn.Parameter):
            return args[0]
        return func(*args, **(kwargs or {}))
