"""The updates of one step that `fuse_optimizer` makes in its backward, each as soon as a gradient is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from zerofx import _torch
from zerofx.accumulate import add_gradient
from zerofx.mesh import ModelParallel
from zerofx.norm import share_of
from zerofx.optimizers import LOCAL_STEPS


class Updates:
    """What is known of a step's gradients.

    A parameter is updated in the backward when all graphs that have read it have handed over its gradient, for until
    then one of them may read it again. Where that does not come, as for one that is also read outside of graphs, the
    gradient waits in `grad`, and the optimizer's step behind the backward updates the parameter.
    """

    def __init__(self, optimizer: optim.Optimizer, model: nn.Module, parallel: ModelParallel) -> None:
        self.optimizer, self.parallel = optimizer, parallel
        trained = {id(param) for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
        self.params = {
            name: param
            for name, param in model.named_parameters()
            if id(param) in trained and isinstance(param, DTensor)
        }
        self.fused = LOCAL_STEPS.can_tell(optimizer)
        self.reads, self.outside, self.done = Counter[str](), set[str](), set[str]()
        self.squared = list[Tensor]()  # norms of the gradients that are gone
        self.over = False

    def read(self, names: Iterable[str]) -> None:
        """Notes the parameters that a call of a graph reads."""
        self.reads.update(names)

    def keep(self, name: str) -> None:
        """Notes a parameter that is read outside of graphs, so that nobody knows when its gradient is whole."""
        self.outside.add(name)

    def end(self) -> None:
        """Notes the end of the backward: what comes later is of no concern to the step."""
        self.over = True

    @torch.no_grad()
    def receive(self, names: Sequence[str], grads: Sequence[Tensor]) -> None:
        """Updates parameters by gradients that a graph hands over, or keeps copies of these."""
        ready = dict[Tensor, Tensor]()
        for name, grad in zip(names, grads, strict=True):
            param = self.params[name]
            self.reads[name] -= 1
            if self.reads[name] or name in self.outside:
                add_gradient(param, grad.clone())
                continue
            if isinstance(param.grad, DTensor):
                grad, param.grad = param.grad.to_local().add_(grad), None
            ready[param] = grad
            self.done.add(name)
        self._add_norms(ready)
        if ready:
            LOCAL_STEPS.step_on(self.optimizer, ready, self.fused)
            for updated in ready:  # fused kernels leave it out; a backward that still needs the old value raises
                torch.autograd.graph.increment_version(cast("DTensor", updated).to_local())

    def _add_norms(self, grads: Mapping[Tensor, Tensor]) -> None:
        for param, norm in zip(grads, _torch.norms(list(grads.values())), strict=True):
            self.squared.append(norm.double().square() * share_of(param, self.parallel))

    def squares(self, like: Tensor) -> Tensor:
        """The sum of the squares of the gradients that are gone, as far as they count on this rank."""
        return torch.stack(self.squared).sum() if self.squared else torch.zeros_like(like)

    def refuse_late_gradients(self) -> None:
        """Raises RuntimeError for a parameter that has got another gradient behind its update."""
        for name in sorted(self.done):
            if self.params[name].grad is not None:
                raise RuntimeError(
                    f"parameter {name!r} was updated in the backward, and has then got another gradient from code that "
                    "reads its stored part, such as a loss of model.parameters(): its update is wrong; leave out "
                    "fuse_optimizer, or read the parameter as an attribute of its module"
                )
