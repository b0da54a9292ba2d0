"""Situations in the parameters: tied, unused, frozen, empty, scalar, oddly sized, oddly typed, oddly named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.models import generator
from tests.situations.situation import Situation, buckets, rows, to_one, tokens
from tests.training import full, sgd


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.emb(ids)))


class TiedEmbeddingWithUnevenRows(Situation):
    """The last rank holds fewer rows of a weight that is embedding and head at once: elsewhere they never move."""

    worlds = (2, 3, 4)

    def model(self) -> nn.Module:
        return TiedModel()

    def batch(self, rank: int, micro: int) -> torch.Tensor:
        ids = torch.randint(0, 11, (4, 6), generator=generator(rank, micro))
        ids[:, -1] = 10
        return ids

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.roll(-1, 1).flatten())

    def check(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        assert model.get_parameter("emb.weight") is model.get_parameter("head.weight")
        assert {"emb.weight", "head.weight"} <= model.state_dict().keys()
        assert len(optimizer.param_groups[0]["params"]) == 3


class UnusedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.unused = nn.Linear(4, 3), nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class UnusedParameter(Situation):
    """Waiting for the gradient of a parameter that nothing reads hangs; a zero instead lets weight decay move it."""

    micro_batches = 4
    batch = rows(3, 4)

    def model(self) -> nn.Module:
        return UnusedModel()

    def groups(self, model: nn.Module) -> Iterable[Any]:
        return [{"params": list(model.parameters()), "weight_decay": 0.1}]

    def check(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        assert torch.equal(full(model.get_parameter("unused")), torch.ones(5))
        assert "unused" in model.state_dict()


class Adapted(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs) / 9), nn.Parameter(torch.randn(outputs, 2) / 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class FrozenBaseWithAdapters(Situation):
    """Frozen and trainable weights in one flat buffer are refused, or cost gradients and states for the frozen ones."""

    batch = rows(5, 6)

    def model(self) -> nn.Module:
        return nn.Sequential(Adapted(6, 7), nn.GELU(), Adapted(7, 3))

    def groups(self, model: nn.Module) -> Iterable[Any]:
        return [{"params": list(model.parameters()), "weight_decay": 0.1}]

    def check(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(0)
        start = self.model().state_dict()
        frozen = {name: param for name, param in model.named_parameters() if "base" in name}
        assert len(frozen) == 4
        for name, param in frozen.items():
            assert torch.equal(full(param), start[name])
            assert param.grad is None and param not in optimizer.state


class EmptyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.extra, self.out = nn.Linear(8, 5), nn.Linear(8, 0, bias=False), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.a(x), self.extra(x)], -1))


class ParameterWithoutElements(Situation):
    """A weight of no rows is not found when it is gathered, or loses its shape in flat storage."""

    batch = rows(4, 8)

    def model(self) -> nn.Module:
        return EmptyModel()

    def check(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        assert model.get_parameter("extra.weight").shape == model.state_dict()["extra.weight"].shape == (0, 8)


class ScalarModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.log_t, self.gain = nn.Linear(5, 4), nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.lin(x), dim=-1) * self.log_t.exp() * self.gain


class ScalarParameter(Situation):
    """A parameter without dims cannot be cut on the first one; some find out only when the state is saved."""

    worlds = (2, 4)
    batch = rows(6, 5)

    def model(self) -> nn.Module:
        return ScalarModel()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch), torch.arange(6) % 4)

    def check(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        scalar = model.get_parameter("log_t")
        assert scalar.shape == model.state_dict()["log_t"].shape == ()
        assert all(value.shape == () for value in optimizer.state[scalar].values())


class NarrowModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 1), nn.Parameter(torch.randn(2, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))) + self.c.sum()


class FewerRowsThanRanks(Situation):
    """Sizes that the number of ranks does not divide are refused, or their padding reaches norms and checkpoints."""

    worlds = (2, 3, 4, 5)
    batch = rows(7, 5)  # of fewer rows the gradients nearly cancel out, and rounding shows

    def model(self) -> nn.Module:
        return NarrowModel()


class ParameterLargerThanABucket(Situation):
    """A gradient larger than the constant buffer that it is copied into for its reduction overruns it."""

    options = buckets(1, 7, 16, 64, 10**6)
    batch = rows(4, 4)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 41), nn.Tanh(), nn.Linear(41, 5, bias=False))


class ComplexModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.lin = nn.Parameter(torch.randn(3, 5, dtype=torch.cfloat) * 0.3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(torch.fft.irfft(torch.fft.rfft(x) * self.w, n=8))


class ComplexParameter(Situation):
    """The imaginary part of a complex gradient is dropped on the way to the other ranks, without a word."""

    refused = ("parameter 'w' is complex", "ignored_params")
    batch = rows(4, 3, 8)
    loss = to_one

    def model(self) -> nn.Module:
        return ComplexModel()


class BagModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.lin = nn.EmbeddingBag(20, 6, sparse=True, mode="sum"), nn.Linear(6, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lin(self.bag(ids))


class SparseGradient(Situation):
    """Sparse gradients are left out of the reduction, without a word."""

    optimizers = (sgd,)
    refused = ("'bag'", "sparse gradients", "sparse=False")
    batch = tokens(20, 4, 3)
    loss = to_one

    def model(self) -> nn.Module:
        return BagModel()


class OddlyNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"_orig_mod": nn.Linear(4, 5), "out": nn.Linear(5, 2)})
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module["out"](torch.tanh(self.module["_orig_mod"](x))) * self.scale


class NamesLikeWrappers(Situation):
    """Checkpoints get a wrapper's prefix and load nowhere else; stripping it breaks models with such a child."""

    batch = rows(3, 4)

    def model(self) -> nn.Module:
        return OddlyNamed()

    def check(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        plain = self.model()
        assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
        state, start = model.state_dict(), self.model().state_dict()
        assert [(key, value.shape, value.dtype) for key, value in state.items()] == [
            (key, value.shape, value.dtype) for key, value in start.items()
        ]
        wanted = {key: full(value) for key, value in state.items()}
        plain.load_state_dict(wanted, strict=True)
        model.load_state_dict(start, strict=True)
        assert not torch.equal(full(model.get_parameter("module.out.bias")), wanted["module.out.bias"])
        model.load_state_dict(plain.state_dict(), strict=True)
        assert all(torch.equal(full(value), wanted[key]) for key, value in model.state_dict().items())
        assert isinstance(model.get_parameter("module._orig_mod.weight"), DTensor)


PARAMETERS: tuple[type[Situation], ...] = (
    TiedEmbeddingWithUnevenRows,
    UnusedParameter,
    FrozenBaseWithAdapters,
    ParameterWithoutElements,
    ScalarParameter,
    FewerRowsThanRanks,
    ParameterLargerThanABucket,
    ComplexParameter,
    SparseGradient,
    NamesLikeWrappers,
)
