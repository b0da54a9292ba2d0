"""Norms of gradients over all ranks of a model, each element counted once however many ranks hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerofx import _torch
from zerofx.mesh import ModelParallel
from zerofx.tensor_parallel import is_marked


def share_of(param: Tensor, parallel: ModelParallel) -> float:
    """For how much the gradient of a parameter counts on this rank: one, divided by the ranks that hold a copy of it.

    A DTensor's placements tell, over the dims of its mesh; over tensor-parallel ranks beside these, Megatron's
    attributes do. A parameter whose `shared` is true is the copy of another one, on another pipeline stage.
    """
    if getattr(param, "shared", False) is True:
        return 0.0
    copies, told = 1, False
    if isinstance(param, DTensor):
        told = param.device_mesh.ndim > 1
        for dim, placement in enumerate(param.placements):
            copies *= param.device_mesh.size(dim) if placement.is_replicate() else 1
    return 1.0 / (copies if told or is_marked(param) else copies * parallel.tensor.size)


def local_gradients(params: Iterable[Tensor], parallel: ModelParallel) -> dict[float, list[Tensor]]:
    """The parts of gradients that this rank holds, by the share for which they count.

    Raises RuntimeError for a gradient that is placed otherwise than its parameter, such as one that waits.
    """
    found: dict[float, list[Tensor]] = defaultdict(list)
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            if not isinstance(param, DTensor) or grad.placements != param.placements:
                raise RuntimeError(
                    f"a gradient is placed as {grad.placements} and its parameter as "
                    f"{getattr(param, 'placements', 'no DTensor')}: leave gradients to the step, and change them in a "
                    "hook before the optimizer's step; those that wait are reduced by a backward outside of no_sync()"
                )
            grad = grad.to_local()
        found[share_of(param, parallel)].append(grad)
    return found


def powers(gradients: dict[float, list[Tensor]], p: float, like: Tensor) -> Tensor:
    """The sum of the p-th powers of what this rank's gradients count for, or their greatest for infinity; float64.

    What is not finite stays so, also where it counts for nothing, so that no rank misses an overflow.
    """
    total = torch.zeros((), dtype=torch.float64, device=like.device)
    for share, tensors in gradients.items():
        norms = torch.stack(_norms(tensors, p)).double()
        if p == inf:
            total = torch.maximum(total, norms.max())
            continue
        found = norms.pow(p).sum()
        total = total + torch.where(found.isfinite(), found * share, found)
    return total


def _norms(tensors: Sequence[Tensor], p: float) -> list[Tensor]:
    filled = [tensor for tensor in tensors if tensor.numel()] if p == inf else tensors
    return _torch.norms(filled, p) or [torch.zeros((), device=tensors[0].device)]
