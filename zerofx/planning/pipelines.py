"""A step of a pipeline: blocks spread evenly over the stages, which run in the order of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerofx.layout import Layout, ParamLayout
from zerofx.pipeline import Pipeline, PipelineError
from zerofx.planning.borders import Borders, borders
from zerofx.planning.capture import Asked, Shapes
from zerofx.planning.hardware import Hardware
from zerofx.planning.networks import send_seconds
from zerofx.planning.replay import Streams
from zerofx.planning.report import StagePlan
from zerofx.planning.steps import Step, stage_plan
from zerofx.planning.stored import Stored
from zerofx.planning.tape import ACTIVATIONS, Half, Tape
from zerofx.planning.tensors import exchange_seconds, note_exchanges, sliced
from zerofx.schedule_check import Simulated, simulate
from zerofx.schedules import BACKWARD, FORWARD, Action, order_of

FEW, MORE = 2, 3
"""Blocks of the models whose difference is what a block takes."""


class Part(NamedTuple):
    """What a stage takes for one micro-batch: seconds of its halves, bytes it keeps for the backward, and the most
    that it needs there besides.
    """

    forward: float
    backward: float
    saved: float
    transient: float


@dataclass(frozen=True)
class Blocks:
    """What one block takes, and what is before and behind all of them."""

    block: Part
    head: Part
    tail: Part

    def of(self, count: int, first: bool, last: bool) -> Part:
        """A stage of that many blocks, and of what is before the first and behind the last one."""
        parts = [(self.block, count), (self.head, int(first)), (self.tail, int(last))]
        return Part(
            sum(times * part.forward for part, times in parts),
            sum(times * part.backward for part, times in parts),
            sum(times * part.saved for part, times in parts),
            max(part.transient for part, times in parts if times),
        )


@dataclass(frozen=True)
class Run:
    """The stages of a pipeline as they run."""

    pipeline: Pipeline
    counts: tuple[int, ...]
    parts: tuple[Part, ...]
    simulated: Simulated
    borders: Borders


def run_pipeline(shapes: Shapes, asked: Asked, pipeline: Pipeline, tensor: int, machine: Hardware) -> Run:
    """Spreads the blocks and runs the schedule, with the seconds of each stage and of messages between ranks.

    Raises PipelineError for more stages than blocks.
    """
    if shapes.blocks < pipeline.stages:
        raise PipelineError(
            f"zerofx.plan cannot cut {shapes.blocks} equal blocks into {pipeline.stages} stages: take at most "
            f"{max(1, shapes.blocks)}"
        )
    found = borders(shapes, asked, machine)
    blocks = _measured(shapes, replace(asked, world=1), found, tensor, machine)
    counts = _spread(shapes.blocks, pipeline.stages, blocks)
    last = pipeline.stages - 1
    parts = tuple(blocks.of(count, place == 0, place == last) for place, count in enumerate(counts))

    def seconds(action: Action) -> float:
        part = parts[action.stage]
        if action.kind == FORWARD:
            return part.forward
        return part.backward if action.kind == BACKWARD else part.backward / 2

    message = float(send_seconds(machine, found.crossing / tensor, asked.world * tensor)) if pipeline.ranks > 1 else 0.0
    return Run(pipeline, counts, parts, simulate(pipeline, order_of(pipeline), seconds, message), found)


def _spread(blocks: int, stages: int, found: Blocks) -> tuple[int, ...]:
    """Blocks for each stage such that the slowest one takes least: one by one to the stage that is fastest with it."""
    counts = [1] * stages
    seconds = [0.0] * stages
    for stage in range(stages):
        part = found.of(1, stage == 0, stage == stages - 1)
        seconds[stage] = part.forward + part.backward
    for _ in range(blocks - stages):
        least = min(range(stages), key=seconds.__getitem__)
        counts[least] += 1
        seconds[least] += found.block.forward + found.block.backward
    return tuple(counts)


def _measured(shapes: Shapes, asked: Asked, found: Borders, tensor: int, machine: Hardware) -> Blocks:
    """Whole parameters, as a stage computes with them."""
    return blocks_taken(shapes.tape(asked, FEW), shapes.tape(asked, MORE), found, tensor, machine)


def blocks_taken(few: Tape, more: Tape, found: Borders, tensor: int, machine: Hardware) -> Blocks:
    """What a block takes, and what is around them, from the tapes of models of `FEW` and of `MORE` blocks."""
    exchange = exchange_seconds(found, machine, tensor)
    numbers = [part_of(sliced(tape, tensor), machine) for tape in (few, more)]
    block = [there - here for here, there in zip(*numbers, strict=True)]
    outside = [here - FEW * each for here, each in zip(numbers[0], block, strict=True)]
    transient = max(0.0, numbers[0][3] - numbers[0][2])
    share, kept = found.head_time, found.head_memory
    return Blocks(
        Part(block[0] + exchange / 2, block[1] + exchange / 2, block[2], block[2]),
        Part(outside[0] * share, outside[1] * share, max(0.0, outside[2] * kept), 0.0),
        Part(outside[0] * (1 - share), outside[1] * (1 - share), max(0.0, outside[2] * (1 - kept)), transient),
    )


def part_of(tape: Tape, machine: Hardware) -> Part:
    """What a whole tape takes."""
    forward, backward = (_seconds(half, machine) for half in (tape.forward, tape.backward))
    return Part(forward, backward, _saved(tape.forward), _most(tape.backward))


def _seconds(half: Half, machine: Hardware) -> float:
    streams = Streams(machine, 1)
    streams.run(half)
    return streams.now


def _saved(half: Half) -> float:
    return float(half.memory.rows[:, ACTIVATIONS].sum())


def _most(half: Half) -> float:
    return float(half.curve()[:, ACTIVATIONS].max() - half.held)


def params_of(shapes: Shapes, layout: Layout, counts: Sequence[int], stage: int) -> list[ParamLayout]:
    """The parameters of a stage: of its blocks, and on the first and last stage those before and behind them.

    A tied one is on both.
    """
    repeats = shapes.repeats
    assert repeats is not None
    first = repeats.start + repeats.period * sum(counts[:stage])
    mine = range(first, first + repeats.period * counts[stage])
    found, before = [], True
    for param in layout:
        inside = param.name.removeprefix(repeats.prefix).split(".")[0] if param.name.startswith(repeats.prefix) else ""
        if inside.isdigit() and repeats.start <= int(inside) < repeats.stop:
            before = False
            if int(inside) in mine:
                found.append(param)
        elif (stage == 0 and before) or (stage == len(counts) - 1 and (not before or param.tied)):
            found.append(param)
    return found


def plan_stages(
    shapes: Shapes, asked: Asked, run: Run, tensor: int, machine: Hardware
) -> tuple[tuple[StagePlan, ...], float]:
    """What the ranks of each stage take, and the seconds of a step.

    Parameters are gathered once a step and whole gradients reduced once, at every stage of ZeRO.
    """
    pipeline, layout = run.pipeline, shapes.layout(asked)
    held = sum(leaf.nbytes for leaf in shapes.tensors)
    found, longest = [], 0.0
    for rank in range(pipeline.ranks):
        stages = pipeline.stages_of(rank)
        params = [param for stage in stages for param in params_of(shapes, layout, run.counts, stage)]
        stored = Stored.of(params, asked.world, tensor)
        streams = Streams(machine, asked.world, stride=tensor)
        step = Step(machine, streams, stored, shapes.buffers, asked.config.bucket_bytes(asked.backend))
        if asked.config.stage:
            step.gather()
        busy = pipeline.microbatches * sum(run.parts[s].forward + run.parts[s].backward for s in stages)
        blocks = sum(run.counts[stage] for stage in stages)
        exchanged = note_exchanges(streams, run.borders, machine, tensor, pipeline.microbatches * blocks)
        streams.compute += busy - exchanged
        saved = sum(run.simulated.in_flight[s] * run.parts[s].saved for s in stages)
        transient = max(run.parts[s].transient for s in stages)
        streams.now += run.simulated.seconds
        step.hold("micro-batches", stored.whole_trained, round(saved + transient + held * pipeline.microbatches))
        step.gradients = stored.whole_trained
        step.reduce(sharded=asked.config.stage > 0)
        step.kept = 0
        step.update()
        _note_messages(streams, run, stages, tensor)
        idle = run.simulated.seconds - busy
        found.append(stage_plan(rank, blocks, step, idle))
        longest = max(longest, streams.now)
    return tuple(found), longest


def _note_messages(streams: Streams, run: Run, stages: Sequence[int], tensor: int) -> None:
    """Counts what is sent to the ranks of the neighbouring stages."""
    pipeline = run.pipeline
    for stage in stages:
        for other in (stage - 1, stage + 1):
            if 0 <= other < pipeline.stages and pipeline.rank_of(other) != pipeline.rank_of(stage):
                streams.collectives["pp", "send"] += pipeline.microbatches
                streams.sent["pp", "send"] += round(pipeline.microbatches * run.borders.crossing / tensor)
