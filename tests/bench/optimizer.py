"""Times ways to end a step: unscale, clip and update by AdamW, on the local tensors of one rank.

python -m tests.bench.optimizer
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

SIZES = {"150 x 64k elements": (150, 64 * 1024), "24 x 1M elements": (24, 1024 * 1024)}
CLIP, SCALE = 1.0, 2.0**16
ROUNDS = 15


def parameters(count: int, numel: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(numel)) for _ in range(count)]
    for param in made:
        param.grad = torch.zeros(numel)
    return made


def unscaled_and_clipped(params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.mul_(1 / SCALE)
    nn.utils.clip_grad_norm_(params, CLIP)


def plain_loop(params: list[nn.Parameter], **how: bool) -> Callable[[], None]:
    """A pass to unscale, one to measure, one to clip, and the update."""
    optimizer = optim.AdamW(params, **how)

    def step() -> None:
        unscaled_and_clipped(params)
        optimizer.step()

    return step


def compiled_loop(params: list[nn.Parameter]) -> Callable[[], None]:
    """The same, compiled."""
    optimizer = optim.AdamW(params, lr=torch.tensor(1e-3))

    @torch.compile
    def step() -> None:
        unscaled_and_clipped(params)
        optimizer.step()

    return step


def compiled_update(params: list[nn.Parameter]) -> Callable[[], None]:
    """The update alone as a graph."""
    optimizer = optim.AdamW(params, lr=torch.tensor(1e-3))
    update = torch.compile(optimizer.step)

    def step() -> None:
        unscaled_and_clipped(params)
        update()

    return step


def told_fused(params: list[nn.Parameter]) -> Callable[[], None]:
    """A pass to measure; the fused update divides by the scale and the clip on its way, as zerofx.train_step does."""
    optimizer = optim.AdamW(params, fused=True)

    def step() -> None:
        grads: list[Tensor] = [param.grad for param in params if param.grad is not None]
        norm = nn.utils.get_total_norm(grads) / SCALE
        optimizer.grad_scale = SCALE / (CLIP / (norm + 1e-6)).clamp(max=1.0)
        optimizer.found_inf = (~norm.isfinite()).float()
        optimizer.step()

    return step


WAYS: dict[str, Callable[[list[nn.Parameter]], Callable[[], None]]] = {
    "torch's default": plain_loop,
    "foreach": lambda params: plain_loop(params, foreach=True),
    "fused": lambda params: plain_loop(params, fused=True),
    "fused, told scale and clip": told_fused,
    "torch.compile of all": compiled_loop,
    "torch.compile of the update": compiled_update,
}


class Way:
    """A way to end a step, with parameters of its own; each step gets the same gradients, at the scale of the loss."""

    def __init__(self, name: str, count: int, numel: int) -> None:
        self.params = parameters(count, numel)
        self.grads = [SCALE * torch.randn(numel) for _ in self.params]
        self.step = WAYS[name](self.params)

    def seconds(self) -> float:
        for param, grad in zip(self.params, self.grads, strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    for title, (count, numel) in SIZES.items():
        ways = {name: Way(name, count, numel) for name in WAYS}
        for name, way in ways.items():
            print(f"{title}: first call of {name}: {way.seconds():.1f} s", flush=True)
        rounds = [{name: way.seconds() for name, way in ways.items()} for _ in range(ROUNDS)]
        for name in ways:
            ratio = statistics.median(each[name] / each["torch's default"] for each in rounds)
            taken = statistics.median(each[name] for each in rounds)
            print(f"{title}: {name}: {1e3 * taken:.1f} ms, {ratio:.2f} of torch's default", flush=True)


if __name__ == "__main__":
    main()
