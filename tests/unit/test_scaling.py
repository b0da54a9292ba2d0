"""The dynamic loss scale follows DeepSpeed's rule, here once more in plain numbers, and survives a save."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

from zerofx.scaling import DynamicLossScale, LossScale, LossScaleError, advance, begin

CPU = torch.device("cpu")
Overflows = Iterable[bool | int]


class Rule:
    """DeepSpeed's, without consecutive hysteresis."""

    def __init__(self, options: DynamicLossScale) -> None:
        self.options, self.scale, self.left = options, options.initial, options.hysteresis
        self.step, self.last_overflow = 0, -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.left == 1:
                if self.scale == self.options.minimum:
                    raise LossScaleError
                self.scale = max(self.scale / self.options.factor, self.options.minimum)
            else:
                self.left -= 1
            self.last_overflow = self.step
        elif (self.step - self.last_overflow) % self.options.window == 0:
            self.left = self.options.hysteresis
            self.scale *= self.options.factor
        self.step += 1


def scales(options: DynamicLossScale, overflows: Overflows) -> list[float]:
    """The scale of each step, and that behind the last one."""
    scale = LossScale(options, CPU)
    found = [scale.scale.item()]
    for overflow in overflows:
        scale.update(torch.tensor(bool(overflow)))
        found.append(scale.scale.item())
    return found


def test_the_defaults_are_deepspeeds() -> None:
    assert DynamicLossScale() == DynamicLossScale(initial=65536.0, window=1000, hysteresis=2, minimum=1.0, factor=2.0)


def test_the_first_overflow_is_absorbed_and_later_ones_halve() -> None:
    assert scales(DynamicLossScale(), [1, 1, 1, 0, 1]) == [65536, 65536, 32768, 16384, 16384, 8192]


def test_a_clean_window_doubles() -> None:
    assert scales(DynamicLossScale(initial=4, window=3), [0] * 7) == [4, 4, 4, 8, 8, 8, 16, 16]


def test_an_overflow_begins_a_new_window() -> None:
    assert scales(DynamicLossScale(initial=4, window=3), [0, 0, 1, 0, 0, 0]) == [4, 4, 4, 4, 4, 4, 8]


def test_only_a_clean_window_refills_the_hysteresis() -> None:
    options = DynamicLossScale(initial=16, window=3)
    assert scales(options, [1, 0, 0, 1]) == [16, 16, 16, 16, 8]
    assert scales(options, [1, 0, 0, 0, 1, 1]) == [16, 16, 16, 16, 32, 32, 16]


def test_the_default_window_is_1000_steps() -> None:
    found = scales(DynamicLossScale(), [0] * 2000)
    assert (found[999], found[1000], found[1999], found[2000]) == (65536, 131072, 131072, 262144)


def test_the_scale_stops_at_its_minimum_with_an_error() -> None:
    options = DynamicLossScale(initial=4, minimum=1.5, hysteresis=1)
    assert scales(options, [1, 1]) == [4, 2, 1.5]
    with pytest.raises(LossScaleError, match=r"smallest loss scale, 1\.5, with no hysteresis left.*precision='bf16'"):
        scales(options, [1, 1, 1])


def test_hysteresis_left_at_the_minimum_is_no_error() -> None:
    assert scales(DynamicLossScale(initial=1), [1, 0]) == [1, 1, 1]


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_every_sequence_of_seven_steps_is_the_rules(window: int, hysteresis: int) -> None:
    options = DynamicLossScale(initial=4, window=window, hysteresis=hysteresis)
    for overflows in itertools.product((False, True), repeat=7):
        state, rule, stuck = begin(options, CPU), Rule(options), False
        for overflow in overflows:
            state = advance(options, state, torch.tensor(overflow))
            try:
                rule.update(overflow)
            except LossScaleError:
                stuck = True
            assert state.stuck.item() is stuck, overflows
            if stuck:
                break
            assert (state.scale.item(), state.hysteresis.item()) == (rule.scale, rule.left), overflows


def test_a_scale_does_not_grow_to_infinity() -> None:
    assert scales(DynamicLossScale(initial=2.0**127, window=1), [0, 0]) == [2.0**127] * 3


def test_a_saved_scale_goes_on_where_it_was() -> None:
    options = DynamicLossScale(initial=8, window=3)
    for before in itertools.product((False, True), repeat=3):
        one, two = LossScale(options, CPU), LossScale(options, CPU)
        for overflow in before:
            one.update(torch.tensor(overflow))
        two.load_state_dict(one.state_dict())
        for overflow in (False, True, False, False, False, True):
            for scale in (one, two):
                scale.update(torch.tensor(overflow))
            assert one.state_dict() == two.state_dict()


def test_a_constant_scale_stays_and_has_no_state() -> None:
    scale = LossScale(128.0, CPU)
    scale.update(torch.tensor(True))
    assert scale.scale.item() == 128 and scale.state_dict() == {}
    with pytest.raises(ValueError, match="pass loss_scale='dynamic'"):
        scale.load_state_dict(LossScale(DynamicLossScale(), CPU).state_dict())


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale, clean and hysteresis, this one has \['growth'\]"):
        LossScale(DynamicLossScale(), CPU).load_state_dict({"growth": 1})


@pytest.mark.parametrize(
    "options",
    [{"initial": 0}, {"factor": 1}, {"window": 0}, {"hysteresis": 1.5}, {"minimum": -1}, {"initial": 1, "minimum": 2}],
)
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is not possible"):
        DynamicLossScale(**options)
