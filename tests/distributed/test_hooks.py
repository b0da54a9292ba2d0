"""Hooks of modules and parameters run on a compiled model, whether they were put on before or after compile."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from tests.distributed.ranks import Net, backward, both, gradients, on_ranks, rows, sharded, square, trained


def doubled(module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
    return out * 2


def shifted(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] + 1,)


def tripled(module: nn.Module, grads: tuple[torch.Tensor], outs: object) -> tuple[torch.Tensor]:
    return (grads[0] * 3,)


def put_hooks(model: nn.Module) -> list[RemovableHandle]:
    """Forward, pre-forward and full backward hooks on submodules, and a forward hook on the root."""
    return [
        model.a.register_forward_hook(doubled),
        model.b.register_forward_pre_hook(shifted),
        model.norm.register_full_backward_hook(tripled),
        model.register_forward_hook(doubled),
    ]


def hooked() -> nn.Module:
    model = Net()
    put_hooks(model)
    return model


@on_ranks(2)
def test_module_hooks_from_before_compile_run() -> None:
    trained(hooked)


@on_ranks(2)
def test_module_hooks_from_after_the_first_call_run_until_removed() -> None:
    model, plain = trained(Net)
    without = model(rows(0))
    handles = [*put_hooks(model), *put_hooks(plain)]
    backward(model, plain)
    assert torch.allclose(model(rows(0)), plain(rows(0)), atol=1e-6)
    for handle in handles:
        handle.remove()
    backward(model, plain)
    assert torch.equal(model(rows(0)), without)


@on_ranks(2)
def test_a_handle_from_before_compile_removes_its_hook() -> None:
    model, seen = Net(), []
    handles = [
        model.a.register_forward_hook(lambda *_: seen.append("forward")),
        model.a.weight.register_hook(lambda _: seen.append("tensor")),
        model.a.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated")),
    ]
    sharded(model, backend="eager")
    square(model, 0).backward()
    assert seen == ["forward", "tensor", "accumulated"]
    for handle in handles:
        handle.remove()
    square(model, 0).backward()
    assert seen == ["forward", "tensor", "accumulated"]


@on_ranks(2)
def test_tensor_hooks_get_the_stored_part_of_the_mean_gradient() -> None:
    model, plain = both(Net)
    for each in (model, plain):
        each.get_parameter("a.weight").register_hook(lambda grad: grad * 3)
    backward(model, plain)


@on_ranks(2)
def test_an_optimizer_step_in_a_post_accumulate_hook_trains() -> None:
    model, plain = both(Net)

    def step(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        square(model, torch.distributed.get_rank()).backward()
        assert gradients(model) == {}
        plain.zero_grad()
        for rank in range(2):
            (square(plain, rank) / 2).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.allclose(model(rows(0)), plain(rows(0)), atol=1e-6)
