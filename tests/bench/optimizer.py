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
        param.grad = SCALE * torch.randn(numel)
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
    """The same, all of it one graph."""
    optimizer = optim.AdamW(params, lr=torch.tensor(1e-3))

    @torch.compile(fullgraph=False)
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


def main() -> None:
    torch.set_num_threads(1)
    for title, (count, numel) in SIZES.items():
        steps: dict[str, Callable[[], None]] = {}
        for name, make in WAYS.items():
            steps[name], start = make(parameters(count, numel)), time.perf_counter()
            steps[name]()
            print(f"{title}: first call of {name}: {time.perf_counter() - start:.1f} s", flush=True)
        taken: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(ROUNDS):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                taken[name].append(time.perf_counter() - start)
        first = statistics.median(taken["torch's default"])
        for name, seconds in taken.items():
            found = statistics.median(seconds)
            print(f"{title}: {name}: {1e3 * found:.1f} ms, {found / first:.2f} of torch's default", flush=True)


if __name__ == "__main__":
    main()
