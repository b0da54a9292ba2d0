"""Situations in the call of a model: outputs and arguments of any structure, unused or changed in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from tests.models import Batch, generator
from tests.situations.situation import Situation, rows


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.aux = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Batch:
        h = torch.relu(self.body(x))
        return {"main": self.main(h), "aux": self.aux(h)}


class OutputThatTheLossIgnores(Situation):
    """Its gradient is waited for in vain; compiled code makes it zero and not None, so that weight decay moves it."""

    zero_gradients = ("aux.weight", "aux.bias")
    batch = rows(3, 4)

    def model(self) -> nn.Module:
        return TwoHeads()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)["main"].square().mean()

    def groups(self, model: nn.Module) -> Iterable[Any]:
        return [{"params": list(model.parameters()), "weight_decay": 0.1}]


@dataclass
class Output:
    loss: torch.Tensor
    hidden: tuple[torch.Tensor, ...] | None = None
    info: Any = None


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, keep_hidden: bool = False) -> Output:
        h = torch.relu(self.a(x))
        loss = (self.b(h) - y).square().mean()
        return Output(loss, (x, h) if keep_hidden else None, {"rows": x.shape[0], "scale": 0.5, "none": None})


class DataclassOutput(Situation):
    """Tensors inside a dataclass are not seen, so parameters are not gathered for their backward."""

    def model(self) -> nn.Module:
        return Structured()

    def batch(self, rank: int, micro: int) -> Any:
        numbers = generator(rank, micro)
        return torch.randn(3, 4, generator=numbers), torch.randn(3, 2, generator=numbers)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        assert model(batch[0], y=batch[1]).hidden is None
        out = model(batch[0], y=batch[1], keep_hidden=True)
        assert type(out) is Output and out.info == {"rows": 3, "scale": 0.5, "none": None}
        return out.loss + out.info["scale"] * out.hidden[1].mean()


class Signature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(
        self, feats: Any, bias: torch.Tensor | None = None, *, scale: float = 1.0, mode: str = "tanh", opts: Any = ()
    ) -> torch.Tensor:
        h = self.a(feats["x"]["v"]) + (bias if bias is not None else 0.0)
        h = torch.tanh(h) if mode == "tanh" else torch.relu(h)
        return self.b(h) * scale + (opts[0] if opts else 0)


class NoneAndKeywordArguments(Situation):
    """None, flags, numbers and nested arguments, which change from step to step, are taken for tensors."""

    def model(self) -> nn.Module:
        return Signature()

    def batch(self, rank: int, micro: int) -> dict[str, Any]:
        numbers = generator(rank, micro)
        return {
            "feats": {"x": {"v": torch.randn(3, 4, generator=numbers)}, "pad": None},
            "bias": None if micro % 2 else torch.randn(6, generator=numbers),
            "scale": 1.0 + micro,
            "mode": ("tanh", "relu")[micro % 2],
            "opts": (0.5, None),
        }

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return (model(**batch) - 1).square().mean()


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return self.b(torch.tanh(self.a(x))).unsqueeze(1)


class OutputViewChangedInPlace(Situation):
    """An in-place change of a view of the output loses the hook that gathers weights for the backward."""

    batch = rows(3, 4)

    def model(self) -> nn.Module:
        return Halving()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone()
        out = model(x).squeeze(1)
        assert torch.equal(x, batch / 2)
        out += 1.0
        out.mul_(x[:, :2])
        return out.square().mean()


CALLS: tuple[type[Situation], ...] = (
    OutputThatTheLossIgnores,
    DataclassOutput,
    NoneAndKeywordArguments,
    OutputViewChangedInPlace,
)
