"""`zerofx.plan`: foresees memory, traffic and time of training on a cluster from the graphs that would run there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zerofx import _torch
from zerofx.config import Config, ConfigError, ModelError, refusal
from zerofx.pipeline import Pipeline
from zerofx.planning import search as layouts
from zerofx.planning.borders import borders
from zerofx.planning.capture import Asked, Shapes
from zerofx.planning.hardware import Hardware, load, names
from zerofx.planning.pipelines import plan_stages, run_pipeline
from zerofx.planning.rates import peak
from zerofx.planning.replay import Streams
from zerofx.planning.report import Plan, StagePlan
from zerofx.planning.search import Found
from zerofx.planning.shapes import Shape
from zerofx.planning.steps import Step, stage_plan
from zerofx.planning.stored import Stored
from zerofx.planning.tape import Tape
from zerofx.planning.tensors import note_exchanges, sliced
from zerofx.planning.traced_search import search_traced
from zerofx.unfit import untraced

ModelFn = Callable[[], nn.Module]


@overload
def plan(
    model_fn: ModelFn, batch: Sequence[Any], *, world: int, search: Literal[True] | Shape, **options: Any
) -> Found: ...


@overload
def plan(
    model_fn: ModelFn, batch: Sequence[Any], *, world: int, search: Literal[False] = False, **options: Any
) -> Plan: ...


def plan(  # type: ignore[misc]
    model_fn: ModelFn,
    batch: Sequence[Any],
    *,
    world: int,
    stage: int = 3,
    precision: str = "bf16",
    microbatches: int = 1,
    pipeline: Pipeline | None = None,
    tensor: int = 1,
    recompute: float = 0.0,
    hardware: str | Hardware = "h100-8x400g",
    loss_fn: Callable[..., Any] | None = None,
    persist_below: int = 10_000,
    bucket_mb: float | None = None,
    prefetch: int = 1,
    reduce_dtype: str | None = None,
    search: bool | Shape = False,
) -> Plan | Found:
    """Foresees one step of `zerofx.train_step` with AdamW: nothing is allocated, and no process group is needed.

    The model is made without data, and its step is captured and rewritten by the passes that `zerofx.compile` would
    run. Of a model that repeats a block more than a few times, two smaller ones are traced, and what one block more
    adds is added for the others. Memory counts each tensor from the op that makes it to its last use; not counted is
    what kernels, allocators, CUDA and NCCL take for themselves. Tensor parallelism is a closed form on top: matrix
    products, weights and activations are cut in `tensor` parts (Korthikanti et al., "Reducing activation recomputation
    in large transformer models", 2022, with sequence parallelism), and two all-gathers and two reduce-scatters of a
    block's input run in each half of a block.

    Args:
        model_fn: makes the model; its tensors stay on the CPU, without data. A call of the model, or
            `loss_fn(model, *batch)`, returns the loss.
        batch: what one rank is given for a step; of tensors only shapes and dtypes are read, so they may be on the
            meta device.
        world: ranks in all, of which `tensor` slice layers between them and the pipeline's run its stages.
        stage: ZeRO's, 0 to 3.
        precision: `fp32`, `bf16` or `fp16`, of autocast; parameters keep their dtype.
        microbatches: the parts, of equally many rows, that the batch is run in.
        pipeline: how the model is cut into stages; its `microbatches` go before.
        tensor: tensor-parallel ranks.
        recompute: the share of activations that the backward computes again.
        hardware: a name, such as h100-8x400g or v100-dgx2, a TOML file, or a Hardware.
        loss_fn: calls the model by default.
        persist_below: as in zerofx.compile; so are `bucket_mb`, `prefetch` and `reduce_dtype`.
        bucket_mb: see there.
        prefetch: see there.
        reduce_dtype: see there.
        search: goes through all sensible arrangements of the ranks, stages, micro-batches and recomputation for steps
            of `world` such batches, in place of planning one, and returns those that no other beats in memory and
            time. True traces what a block takes of micro-batches of two and of four rows, and goes on by closed forms;
            a zerofx.planning.shapes.Shape, such as `preset(name).shape`, is a transformer of which nothing is traced,
            in 16-bit training as in zerofx.planning.search.

    Raises:
        ConfigError: an argument has a value that is not allowed, or ranks and micro-batches do not divide.
        ModelError: the model cannot be sharded, or its step cannot be traced or has no backward.
    """
    given = {name: value for name, value in locals().items() if name not in ("model_fn", "batch", "loss_fn")}
    machine = _checked(model_fn, batch, pipeline, loss_fn, hardware)
    if search is not False:
        return _searched(model_fn, batch, world, machine, precision, search, loss_fn)
    with _in_own_words():
        config = Config(
            stage=stage,
            precision=precision,
            recompute=recompute,
            persist_below=persist_below,
            bucket_mb=bucket_mb,
            prefetch=prefetch,
            reduce_dtype=reduce_dtype,
        )
    count = microbatches if pipeline is None else pipeline.microbatches
    across = 1 if pipeline is None else pipeline.ranks
    _check(world=world, tensor=tensor, microbatches=count)
    if world % (tensor * across):
        _refuse(
            "world", world, f"a multiple of {tensor * across}: {tensor} tensor-parallel times {across} stages' ranks"
        )
    shapes = Shapes(model_fn, micro_batch(batch, count))
    asked = Asked(config, world // (tensor * across), "gloo" if machine.device == "cpu" else "nccl", loss_fn)
    ranks = (("dp", asked.world), ("tp", tensor), ("pp", across))
    with _in_own_words():
        if pipeline is None:
            tape = _tape(shapes, asked, count)
            stages, seconds = _alone(shapes, asked, tape, count, tensor, machine)
            bubble = 0.0
        else:
            tape = shapes.tape(replace(asked, world=1))
            run = run_pipeline(shapes, asked, pipeline, tensor, machine)
            stages, seconds = plan_stages(shapes, asked, run, tensor, machine)
            bubble = run.simulated.bubble
    rows, tokens = rows_of(batch)
    flops = tape.model_flops * count * asked.world
    most = world * peak(machine, precision) * seconds
    return Plan(
        asked=tuple((name, _plain(value)) for name, value in given.items()),
        hardware=machine.name,
        elements=shapes.elements,
        ranks=ranks,
        stages=stages,
        seconds=seconds,
        bubble=bubble,
        samples=rows * asked.world,
        tokens=tokens * asked.world,
        flops=flops,
        mfu=flops / most,
        memory_bytes=machine.memory_bytes,
        traced=(shapes.most_traced, shapes.blocks),
    )


def _searched(
    model_fn: ModelFn,
    batch: Sequence[Any],
    world: int,
    machine: Hardware,
    precision: str,
    search: bool | Shape,
    loss_fn: Callable[..., Any] | None,
) -> Found:
    _check(world=world)
    rows, tokens = rows_of(batch)
    if not isinstance(search, Shape):
        return search_traced(model_fn, batch, rows, tokens, world, machine, precision, loss_fn)
    return layouts.search(search, world, rows * world, machine, dtype=precision)


def _gathers_once(asked: Asked, count: int) -> bool:
    """Whether parameters, if they are stored in parts, are gathered once a step: see `Engine.micro_batch`."""
    return count > 1 and asked.world > 1 and asked.config.stage < 3


def _tape(shapes: Shapes, asked: Asked, count: int) -> Tape:
    """That of each of the micro-batches: with several, stages 0 and 1 reduce beside them, and stage 2 gathers so."""
    if not _gathers_once(asked, count):
        return shapes.tape(asked)
    if asked.config.stage < 2:
        return shapes.tape(replace(asked, world=1))
    whole = shapes.tape(replace(asked, config=replace(asked.config, stage=0)))
    stored = Stored.of(shapes.layout(asked), asked.world)
    return whole.scattered(stored.trained / max(1, stored.whole_trained))


def _alone(
    shapes: Shapes, asked: Asked, tape: Tape, count: int, tensor: int, machine: Hardware
) -> tuple[tuple[StagePlan, ...], float]:
    """What ranks take that are in no pipeline."""
    stored = Stored.of(shapes.layout(asked), asked.world, tensor)
    streams = Streams(machine, asked.world, stride=tensor)
    step = Step(machine, streams, stored, shapes.buffers, asked.config.bucket_bytes(asked.backend))
    step.waiting = (count - 1) * sum(each.nbytes for each in shapes.tensors)
    exchanged = 0.0
    if tensor > 1:
        found = borders(shapes, asked, machine)
        exchanged = note_exchanges(streams, found, machine, tensor, count * shapes.blocks)
    once, stage = _gathers_once(asked, count), asked.config.stage
    if once and stage:
        step.gather()
    defers = once and stage < 2
    step.micro_batches(sliced(tape, tensor), count, stored.whole_trained if defers else stored.trained)
    if defers:
        step.reduce(sharded=bool(stage))
    step.kept = 0
    step.update()
    return (stage_plan(0, shapes.blocks, step),), streams.now + exchanged


def _plain(value: object) -> str | int | float | None:
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def rows_of(batch: Sequence[Any]) -> tuple[int, int]:
    """The rows of a batch, and its tokens: elements of the first tensor, if they are integers."""
    tensors = [leaf for leaf in tree_leaves(list(batch)) if isinstance(leaf, torch.Tensor)]
    if not tensors or not tensors[0].dim():
        return 1, 1
    first = tensors[0]
    whole_numbers = not first.is_floating_point() and not first.is_complex()
    return first.shape[0], first.numel() if whole_numbers else first.shape[0]


def micro_batch(batch: Sequence[Any], count: int) -> list[Any]:
    """One of `count` equal parts of a batch. Raises ConfigError where its rows do not divide."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        if tensor.shape[0] % count:
            _refuse("microbatches", count, f"a divisor of the batch's {tensor.shape[0]} rows")
        return tensor[: tensor.shape[0] // count]

    found: list[Any] = tree_map_only(torch.Tensor, part, list(batch))
    return found


def _checked(model_fn: object, batch: object, pipeline: object, loss_fn: object, hardware: Any) -> Hardware:
    """The machine. Raises ConfigError for an argument of another kind than plan takes."""
    if not callable(model_fn) or isinstance(model_fn, nn.Module):
        _refuse("model_fn", _kind(model_fn), "a function that makes the model, such as lambda: Model(), and no model")
    if not isinstance(batch, (tuple, list)):
        _refuse("batch", _kind(batch), "a tuple of what a step is called with, such as (x,) for one tensor")
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        _refuse("pipeline", pipeline, "a zerofx.Pipeline, such as zerofx.Pipeline(4, microbatches=8), or None")
    if loss_fn is not None and not callable(loss_fn):
        _refuse("loss_fn", loss_fn, "a function of the model and a batch that returns a scalar, or None")
    if not isinstance(hardware, (str, Path, Hardware)):
        _refuse("hardware", hardware, f"one of {', '.join(names())}, a TOML file, or a Hardware")
    return load(hardware)


def _kind(value: object) -> str:
    return value if isinstance(value, str) else type(value).__name__


@contextmanager
def _in_own_words() -> Iterator[None]:
    """Says of plan what training would say of compile, and in a sentence where a step cannot be traced."""
    try:
        with _torch.quiet_tracing():
            yield
    except ConfigError as error:
        raise error if error.told is None else refusal("zerofx.plan", *error.told) from None
    except Exception as error:
        if not _torch.is_tracing_error(error):
            raise
        remedy = "give a batch that the model, or loss_fn, takes, and code that torch.compile traces as one graph"
        raise ModelError(f"the step to plan cannot be traced: {untraced(error)}; {remedy}") from None


def _check(**counts: Any) -> None:
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            _refuse(name, value, "an int, 1 or more")


def _refuse(field: str, value: object, allowed: str) -> NoReturn:
    raise refusal("zerofx.plan", field, value, allowed)
