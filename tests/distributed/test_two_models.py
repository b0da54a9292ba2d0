"""Several compiled models live and train side by side in one process."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
import torch.nn as nn

import zerofx
from tests.distributed.ranks import Net, backward, both, gradients, on_ranks, rows, same, whole

Pair = tuple[nn.Module, nn.Module]


def adversarial_steps(generator: nn.Module, critic: nn.Module, ranks: list[int]) -> None:
    """Alternates steps of the two, each on the mean over `ranks`."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
    for step in range(2):
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            optimizer.zero_grad()
            for rank in ranks:
                fake = generator(rows(10 * step + rank))
                loss = sign * critic(fake).mean() - critic(rows(99 + rank)).tanh().mean()
                (loss / len(ranks)).backward()
            optimizer.step()
            for each in (generator, critic):
                each.zero_grad()


@on_ranks(2)
def test_generator_and_critic_train_in_turn() -> None:
    (generator, plain_generator), (critic, plain_critic) = both(Net), both(lambda: nn.Linear(7, 1))
    adversarial_steps(generator, critic, [dist.get_rank()])
    adversarial_steps(plain_generator, plain_critic, [0, 1])
    same(whole(generator), whole(plain_generator))
    same(whole(critic), whole(plain_critic))


@on_ranks(2)
def test_a_frozen_teacher_guides_a_student() -> None:
    teacher, plain_teacher = both(lambda: Net().requires_grad_(False))
    student, plain_student = both(lambda: nn.Linear(7, 7))
    guide = {student: teacher, plain_student: plain_teacher}

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        with torch.no_grad():
            wanted = guide[model](rows(rank))
        return (model(rows(rank)) - wanted).square().mean()

    backward(student, plain_student, loss)
    assert gradients(teacher) == {}
    assert {graph.kind for graph in zerofx.inspect(teacher).graphs} == {"inference"}


@on_ranks(2)
def test_ten_models_of_one_class_keep_their_own_graphs_and_gradients() -> None:
    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor, self.inner = factor, nn.Linear(7, 3, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.factor

    for factor in range(1, 11):
        model, plain = both(lambda factor=factor: Scaled(factor))
        backward(model, plain)
        assert len(zerofx.inspect(model).graphs) == 1


@on_ranks(2)
def test_a_model_that_is_gone_leaves_another_of_its_class_alone() -> None:
    model, plain = both(Net)
    other, _ = both(Net)
    other(rows(0))
    del other
    gc.collect()
    backward(model, plain)
