"""`zerofx.compile`: checks model and arguments on every rank, shards the parameters, hands over to the engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from os import PathLike
from typing import Any, Never, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerofx import watch
from zerofx.agree import refuse_without_mesh
from zerofx.agree_all import Facts, agree_all
from zerofx.allowance import allowed_bytes
from zerofx.check_model import find_owners, parameters_of, refuse_model, refuse_without_blocks
from zerofx.config import Config, Rewrite, refuse_values
from zerofx.engine import Engine, autocast
from zerofx.facts import facts_of
from zerofx.groups import NotInMeshError, arrange, backend_of, program_mesh
from zerofx.manager import Pass
from zerofx.materialise import InitFn, Materialiser, refuse_unwritable
from zerofx.meet import meet
from zerofx.mesh import ModelParallel
from zerofx.parallel import Mesh
from zerofx.pipeline import Example, Pipeline, refuse_beside
from zerofx.pipeline_mesh import ALONE, arrange_pipeline
from zerofx.pipelined import Pipelined
from zerofx.place import Pipe, place
from zerofx.recipe import passes_of
from zerofx.reporting.progress import shown_progress
from zerofx.reporting.recorder import Recorder, recorder
from zerofx.shard import Owner
from zerofx.stage_plan import Foreign, Plan
from zerofx.unsupported import ARGUMENTS, refuse_arguments, refuse_stages

M = TypeVar("M", bound=nn.Module)


def compile(  # noqa: A001
    model: M,
    *,
    stage: int = 3,
    mesh: DeviceMesh | Mesh | None = None,
    mpu: Any = None,
    persist_below: int = 10_000,
    bucket_mb: float | None = None,
    prefetch: int = 1,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    memory: str | int | float | None = None,
    recompute: float | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    init_fn: InitFn | None = None,
    sync_init: bool = True,
    backend: str = "inductor",
    passes: Rewrite | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    per_block: bool = False,
    pipeline: Pipeline | None = None,
    example_inputs: Example | None = None,
    record: str | PathLike[str] | None = None,
    progress: bool | None = None,
    **others: Never,
) -> M:
    """Shards a model's parameters over the data-parallel ranks and compiles it, in place; returns `model`.

    Build the optimizer from `model.parameters()` afterwards and train as before: each rank feeds its own part of the
    global batch, and `loss.backward()` leaves in `p.grad` this rank's part of the mean gradient over all ranks.
    Parameters become `DTensor`s; `state_dict` keys, module classes, attributes and hooks stay what they were.

    Buffers belong to their rank: what a forward writes into one stays there, as under DDP with
    `broadcast_buffers=False`. A parameter that only outputs depend on which the loss ignores has a zero gradient and
    not None, as in any compiled graph, so that weight decay moves it; one that the forward does not read has None.

    Args:
        model: the model, on the device it trains on, with the same structure on every rank.
        stage: 3 stores each rank's part of the parameters, gathers them for use and releases them after it; 1 and 2
            store parts too, but keep what was gathered in the forward for the backward; 0 replicates the parameters.
            Gradients have the placement of their parameters.
        mesh: a DeviceMesh of one dimension, or with one named `dp`, to shard over, or a zerofx.Mesh. Ranks along its
            dimensions `tp` and `pp` hold other parts of the model. Default: that of which the mesh of DTensor
            parameters is a part, or all ranks of the default group, which is made from torchrun's environment if need
            be; without either, one rank and no group.
        mpu: in place of `mesh`, any object with the functions of Megatron's mpu, as in zerofx.Mesh. What is sliced is
            marked by `param.tensor_model_parallel = True`, other parameters are copies on all tensor-parallel ranks;
            gradients of those with `param.sequence_parallel = True` are added up over them. Initial values, gradients
            and parts of parameters travel between data-parallel ranks only.
        persist_below: parameters of fewer elements stay replicated.
        bucket_mb: collectives of small tensors are issued together, up to this many MiB (2**20 bytes). Default: as many
            as make a message's latency a tenth of its time, on the group's backend (`python -m zerofx tune`).
        prefetch: how many buckets of parameters are gathered ahead of their use, beside the computation before it.
        precision: `bf16` or `fp16` calls the model under torch.autocast to that dtype, `fp32` with autocast off; by
            default as the caller has it. Parameters, their gradients and the optimizer stay as they are, and what the
            model returns has the dtypes that autocast gives it. With `fp16` the loss needs a scale:
            zerofx.train_step has one, and torch.amp.GradScaler is for loops.
        reduce_dtype: the dtype in which graphs reduce gradients: `fp32`, `bf16` or `fp16`. By default that of the
            parameter, which is also the one in which they are added up in `p.grad`.
        memory: what a rank may hold while it trains: bytes (`"20GiB"`, or an int), or a float up to 1, a fraction of
            the GPU's memory or of the rank's part of the host's. Counted are parameters, gradients, AdamW's two
            moments, and what the graphs of the model hold at most by a forecast from shapes; not the loss outside of
            the model, nor what kernels, allocators and CUDA itself take. At stage 3 parameters stay gathered from
            forward to backward, largest first, as far as that fits; if nothing does, activations are computed again.
            Ranks decide once, at the first training graph, for the one that needs most.
        recompute: the share, from 0 to 1, of the bytes of activations that the backward computes again and does not
            save, those first that cost least; the least that `memory` starts from. What draws random numbers, attention
            among it, is always saved. By default only what torch's partition computes again by itself.
        ignored_params: parameters that are left alone: neither sharded nor synchronised, their gradients not reduced.
        init_fn: writes the parameters and buffers of one module, for a model on the meta device; default: the module's
            own `reset_parameters()`. Modules are made and cut one by one, so no rank ever holds the whole model.
        sync_init: start from the parameters and buffers of the group's first rank.
        backend: `inductor`; `interpreter` runs the rewritten graphs node by node; `eager` makes no graph at all.
        passes: a function from the default tuple of passes to the tuple to run.
        dynamic: as in torch.compile.
        fullgraph: make code that torch.compile cannot put into a graph an error.
        per_block: compile modules of one class in a ModuleList, Sequential or ModuleDict each on its own, and those
            alike once: compile time does not grow with depth. The code around them runs as it is, and buckets and
            schedules end at each block.
        pipeline: cuts the model into stages that run on different ranks, as the zerofx.Pipeline says; see there. Ranks
            are those of a mesh with the dimensions `pp` and `dp`, and `tp` where layers are sliced, or of an mpu, or by
            default all, the ones that share a stage side by side. Each rank is given the whole model, or its slices of
            the whole, and keeps the parameters and buffers of its stages, under their names; the others are None. The
            model is then trained and evaluated by zerofx.train_step and zerofx.eval_step, and all ranks of a pipeline
            are given the same batch. Parameters are gathered once a step at every stage of ZeRO, unless the Pipeline
            says otherwise, and gradients reduced once. `memory`, if given, bounds what a stage of the pipeline takes.
        example_inputs: with a pipeline, `(args, kwargs)` of a call of the model for a micro-batch. Only shapes and
            dtypes are read; batches of other shapes are cut into the same stages.
        record: a folder, one for each model and the same on every rank. Each rank writes there what it was asked for,
            and what the passes made of each graph as it is compiled; what an earlier run has left there is replaced.
            `python -m zerofx report` and `python -m zerofx inspect` show it.
        progress: show on rank 0 which pass runs where compiling takes more than a second; default: in a terminal.
        others: no other argument is taken; those of FSDP, DDP and DeepSpeed are refused with what to do instead.

    Raises:
        ConfigError: an argument has a value that is not allowed.
        ModelError: the model holds something that cannot be sharded.
        PipelineError: the model cannot be cut into the stages asked for, or its forward is no single graph.
        RankMismatchError: ranks differ in the model or the arguments.

    The first forward for training raises MemoryLimitError where a step needs more than `memory` in any way.
    """
    problem: Exception | None = None
    facts: Facts = {}
    config, owners = Config(), list[Owner]()
    order: tuple[Pass, ...] = ()
    device = _device_of(model, mesh)
    where, plan = ALONE, None
    recording: Recorder | None = None
    try:
        if isinstance(pipeline, Pipeline):
            where = arrange_pipeline(model, mesh, mpu, device, pipeline)
        ranks = where.ranks if isinstance(pipeline, Pipeline) else arrange(model, mesh, mpu, device)
    except NotInMeshError:
        raise
    except Exception as error:
        refuse_without_mesh(error)
    data, parallel = (None, ModelParallel()) if ranks is None else (ranks.data, ranks.model_parallel)
    if isinstance(pipeline, Pipeline):
        parallel = where.parallel
    group = None if data is None else data.get_group()
    everyone = where.everyone or group
    ignored = list[nn.Parameter]()
    try:
        refuse_model(model)
        refuse_arguments("zerofx.compile", others, TAKEN, ARGUMENTS)
        refuse_stages(stage)
        ignored = parameters_of(ignored_params, model)
        refuse_values(init_fn, progress)
        config = Config(
            stage=stage,
            persist_below=persist_below,
            bucket_mb=bucket_mb,
            prefetch=prefetch,
            memory=memory,
            recompute=recompute,
            sync_init=sync_init,
            backend=backend,
            passes=passes,
            dynamic=dynamic,
            fullgraph=fullgraph,
            per_block=per_block,
            precision=precision,
            reduce_dtype=reduce_dtype,
        )
        recording = None if record is None else recorder(record, model, config)
        order = passes_of(config, backend_of(group, device))
        if config.per_block:
            refuse_without_blocks(model)
        refuse_unwritable(model, init_fn)
        owners = find_owners(model, ignored, ranks)
        refuse_beside(pipeline, example_inputs, config)
        if pipeline is not None and example_inputs is not None:
            cap = None if memory is None else allowed_bytes(memory, device)
            autocasting = functools.partial(autocast, config.precision, device)
            plan = Plan(model, pipeline, device, autocasting, example_inputs, cap)
        facts = facts_of(model, config, order, owners, plan)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    if recording is not None:
        recording.begin(facts.get("dp", {}), problem)
    told = agree_all(facts, problem, everyone, parallel, model)

    pipe = Pipe(where.everyone, Foreign.of(model, owners, ignored, where.place, plan))
    layout, left_alone = place(model, owners, Materialiser(device, init_fn), ranks, config, ignored, pipe)
    if group is not None and group.size() > 1 and "gloo" in backend_of(group, device):
        meet(group)
    for each, notes in told:
        watch.start(each, notes, model)
    rank = 0 if data is None else data.get_local_rank()
    engine = Engine(config, order, program_mesh(data), layout, rank, left_alone, parallel)
    if plan is not None:
        engine.pipelined = Pipelined(plan, where, device)
    engine.recorder, engine.progress = recording, shown_progress(progress)
    if recording is not None:
        recording.placed(engine)
    engine.attach(model)
    return model


TAKEN = tuple(
    name for name, each in inspect.signature(compile).parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY
)


def _device_of(model: nn.Module, mesh: Any) -> torch.device:
    """Where the parameters are; those on the meta device go where the mesh is, or on the GPU if there is one."""
    params = model.parameters() if isinstance(model, nn.Module) else ()
    real = next((param.device for param in params if not param.is_meta), None)
    if real is not None:
        return real
    if isinstance(mesh, (DeviceMesh, Mesh)):
        return torch.device((mesh.data if isinstance(mesh, Mesh) else mesh).device_type)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
