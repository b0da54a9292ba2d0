"""What the forward drew at random or overwrote is what the backward works with, whatever it computes again."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

import zerofx


class Net(nn.Module):
    """A buffer that is read, also through a view, and then overwritten; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("shift", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sin(torch.sin(self.up(x)) + self.shift.view(1, 32))
        self.shift.add_(1)
        return self.down(torch.sin(nn.functional.dropout(hidden, 0.5)))


def gradients(wrapped: bool, stock: str = "", **options: float | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    if stock:
        torch.compiler.reset()
        model.compile(backend=stock)
    if wrapped:
        torch.compiler.reset()
        zerofx.compile(model, backend="interpreter", persist_below=0, **options)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(16, 8)).square().sum().backward()
    return [param.grad for param in model.parameters()]


@pytest.mark.parametrize("recompute", [None, 0.5, 1.0])
def test_gradients_have_the_bits_of_eager_code(recompute: float | None) -> None:
    for found, expected in zip(gradients(True, recompute=recompute), gradients(False), strict=True):
        assert torch.equal(found, expected)


def test_stock_torch_compile_works_with_what_was_written_later() -> None:
    found, expected = gradients(False, "aot_eager")[0], gradients(False)[0]
    assert not torch.allclose(found, expected, rtol=0.1)
