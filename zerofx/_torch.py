"""Every private torch API that zerofx uses, so that a new torch version is one file to check."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch._dynamo as _dynamo
import torch._functorch.config as _functorch_config
import torch._inductor.config as _inductor_config
import torch.autograd.profiler as _autograd_profiler
import torch.distributed.distributed_c10d as _c10d
from torch._dynamo.eval_frame import skip_code as _skip_code
from torch._dynamo.exc import BackendCompilerFailed as _BackendCompilerFailed
from torch._dynamo.exc import TorchDynamoException as _TorchDynamoException
from torch._dynamo.source import ConstantSource as _ConstantSource
from torch._functorch._aot_autograd import descriptors as _desc
from torch._functorch.aot_autograd import aot_module_simplified as _aot_module_simplified
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.runtime.cache_dir_utils import cache_dir as _cache_dir
from torch._library.fake_class_registry import FakeScriptObject as _FakeScriptObject
from torch._logging._internal import trace_structured as _trace_structured
from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules as _schedules
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic as _DimDynamic
from torch.fx.experimental.symbolic_shapes import ShapeEnv as _ShapeEnv

F = TypeVar("F", bound=Callable[..., Any])
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator
TCPStore = cast(Any, torch.distributed).TCPStore  # public, but type checkers do not see it
PrefixStore = cast(Any, torch.distributed).PrefixStore


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group of that name."""
    return cast("torch.distributed.ProcessGroup", cast(Any, _c10d)._resolve_process_group(name))


def process_groups() -> list[torch.distributed.ProcessGroup]:
    """All process groups that this rank is in."""
    return list(_c10d._world.pg_map) if torch.distributed.is_initialized() else []


def group_size(group: str) -> int:
    """Number of ranks in the process group of that name."""
    return process_group(group).size()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was taken out of, or itself."""
    return cast("DeviceMesh", cast(Any, mesh)._get_root_mesh())


def local_tensor(value: DTensor) -> torch.Tensor:
    """The part that this rank has, without the op that `to_local` is."""
    return cast("torch.Tensor", cast(Any, value)._local_tensor)


def register_work(result: torch.Tensor, work: torch.distributed.Work) -> None:
    """Makes `_c10d_functional.wait_tensor` of the result wait for the work."""
    cast(Any, torch._C)._distributed_c10d._register_work(result, work)


@functools.cache
def lower_as_collective(op: OpOverload) -> None:
    """Tells Inductor that an op of a list of tensors only issues what wait_tensor completes.

    Until then it leaves the op's inputs as they are. They are laid out contiguously.
    """
    from torch._inductor import ir, lowering  # slow to import, and needed by this backend alone

    def lower(inputs: Sequence[Any], *args: Any) -> Any:
        inputs = [ir.ExternKernel.require_contiguous(each) for each in inputs]
        results = cast(Any, ir._CollectiveKernel.create_out_of_place(op, inputs, *args))
        return [ir.TensorBox.create(result) for result in results]

    cast(Any, lowering).add_layout_constraint(op, lowering.constrain_to_fx_strides)
    cast(Any, lowering).register_lowering(op)(lower)


def never_compile_alone(function: Callable[..., Any]) -> None:
    """Keeps Dynamo from compiling the function as a frame of its own; it is still traced into by a caller's frame."""
    _skip_code(function.__code__)


def outside_graphs(function: F) -> F:
    """Makes Dynamo leave its graph for a call of the function, and come back for what the function calls."""
    return cast(F, cast(Any, torch.compiler).disable(function, recursive=False))


def own_code(function: F) -> F:
    """Gives the function a code object of its own: by that, Dynamo keeps what it compiled and counts it."""
    function.__code__ = function.__code__.replace()
    return function


def own_limit(modules: int = 1) -> dict[str, Any]:
    """Arguments of torch.compile that let a model count its own recompilations, where torch knows them.

    Otherwise models with the same module classes share one limit, past which the classes' code runs eagerly. The limit
    is twice torch's, for what is compiled once more where gradients wait, and one more for each further module that
    shares the compiled code.
    """
    known = inspect.signature(torch.compile).parameters
    asked: dict[str, Any] = {"isolate_recompiles": True}
    asked["recompile_limit"] = 2 * _dynamo.config.recompile_limit + modules - 1
    return {name: value for name, value in asked.items() if name in known}


def hook_guards() -> AbstractContextManager[Any]:
    """While it is entered, graphs that Dynamo compiles are guarded on module hooks that are put on later."""
    return cast("AbstractContextManager[Any]", _dynamo.config.patch(skip_nnmodule_hook_guards=False))


def _backward_as_eager() -> AbstractContextManager[Any]:
    """While it is entered, the backward of what is compiled is traced as eager code runs it: outside of autocast.

    Otherwise the autocast around the call of the model reaches into the backward of regions that the user took out.
    """
    return cast("AbstractContextManager[Any]", _functorch_config.patch(backward_pass_autocast="off"))


def activation_budget(share: float) -> AbstractContextManager[Any]:
    """While it is entered, the partition saves at most that share of the activations that it would save otherwise.

    Objects among the inputs, which are meshes of DTensors, have no bytes.
    """
    changes: dict[str, Any] = {"activation_memory_budget": share}
    if hasattr(_functorch_config, objects := "unsafe_treat_script_objects_as_zero_size"):
        changes[objects] = True
    return cast("AbstractContextManager[Any]", _functorch_config.patch(changes))


def graph_break_reasons() -> Counter[str]:
    """How often Dynamo left a graph, by its reason."""
    return Counter(_dynamo.utils.counters["graph_break"])


def has_step_hooks(optimizer: torch.optim.Optimizer, behind: bool = False) -> bool:
    """Whether hooks of the optimizer's own run before its steps, or, if so asked, behind them."""
    return bool(optimizer._optimizer_step_pre_hooks or (behind and optimizer._optimizer_step_post_hooks))


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """The step of the optimizer's class, without hooks before and behind it."""
    step = cast(Any, type(optimizer)).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def norms(tensors: Sequence[torch.Tensor], p: float = 2.0) -> list[torch.Tensor]:
    """The p-norm of each tensor, in float32 at least."""
    if not tensors:
        return []
    wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    return list(torch._foreach_norm(list(tensors), p, dtype=torch.float64 if wide else torch.float32))


def multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies each tensor, in place, by the 0-dim one."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Runs the function when the backward that is under way has come to its end."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(function)


def post_accumulate_hooks(param: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """The hooks that run behind the accumulation of a parameter's gradient."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def input_index(desc: Any) -> int | None:
    """The place among a Dynamo graph's inputs of the AOTAutograd input (or gradient) that `desc` describes."""
    while desc is not None and not isinstance(desc, _desc.PlainAOTInput):
        desc = getattr(desc, "base", None) or getattr(desc, "grad_of", None)
    return None if desc is None else desc.idx


def is_subclass_part(desc: Any) -> bool:
    """Whether an input is an inner tensor of a DTensor."""
    return isinstance(desc, _desc.SubclassGetAttrAOTInput)


def is_gradient(desc: Any) -> bool:
    """Whether a joint graph's output is the gradient of an input."""
    while isinstance(desc, _desc.SubclassGetAttrAOTOutput):
        desc = desc.base
    return isinstance(desc, _desc.GradAOTOutput)


def overwritten(desc: Any) -> Any:
    """What describes the input that a joint graph's output is written to after the forward, or None."""
    return desc.mutated_input if isinstance(desc, _desc.InputMutationAOTOutput) else None


def is_tangent(desc: Any) -> bool:
    """Whether a joint graph's input is the gradient of an output."""
    while isinstance(desc, _desc.SubclassGetAttrAOTInput):
        desc = desc.base
    return isinstance(desc, _desc.TangentAOTInput)


def compiled_backward(results: Sequence[Any]) -> torch.autograd.graph.Node | None:
    """The node in which the backward of a compiled graph runs, from the graph's results."""
    for result in results:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        while node is not None and type(node).__name__ != "CompiledFunctionBackward":
            node = node.next_functions[0][0] if node.next_functions else None  # a result may be a view of what it made
        if node is not None:
            return node
    return None


def fake_tensors() -> AbstractContextManager[Any]:
    """While it is entered, tensors that are made have no data; they say that they are on the CPU."""
    return cast("AbstractContextManager[Any]", _FakeTensorMode())


def boxed(function: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """Marks a function that takes its inputs as one list, which it may empty."""

    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def aot_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    compiler: Any,
    inference_compiler: Any,
    partition: Any,
    backward_compiler: Any = None,
) -> Callable[..., Any]:
    """Traces a Dynamo graph with its backward, without decompositions, so that each op runs the eager kernel."""
    with _backward_as_eager():
        return _aot_module_simplified(
            gm,
            inputs,
            fw_compiler=compiler,
            bw_compiler=backward_compiler or compiler,
            inference_compiler=inference_compiler,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )


class _Partition(CustomPartitionerFn):
    def __init__(self, partition: Callable[..., Any], uuid: str) -> None:
        self.partition, self._uuid = partition, uuid

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        return cast("tuple[GraphModule, GraphModule]", self.partition(gm, joint_inputs, **kwargs))

    def uuid(self) -> str:
        return self._uuid

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self._uuid,)  # the compile caches make their keys of what is pickled: of nothing but the uuid


class _Infer(CustomGraphPass):
    def __init__(self, infer: Callable[[Graph], None], uuid: str) -> None:
        self.infer, self._uuid = infer, uuid

    def __call__(self, graph: Graph) -> None:
        self.infer(graph)

    def uuid(self) -> str:
        return self._uuid

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self._uuid,)  # the compile caches make their keys of what is pickled: of nothing but the uuid


def inductor_module() -> Any:
    """Inductor's entry, which is slow to import, and needed by this backend alone."""
    from torch._inductor import compile_fx

    return compile_fx


def inductor_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    partition: Any,
    infer: Any,
    uuid: str,
    use_caches: bool = True,
    backward_compiler: Any = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph with Inductor, with our partition and a pass over graphs that have no backward.

    `backward_compiler`, if given, compiles the backward; it cannot be cached.
    """
    patches: dict[str, Any] = {
        "custom_partitioner_fn": _Partition(partition, uuid),
        "post_grad_custom_pre_pass": _Infer(infer, uuid),
        "reorder_for_peak_memory": False,
    }
    if not use_caches:
        patches["force_disable_caches"] = True
    options: dict[str, Any] = {}
    if backward_compiler is not None:

        def inner(graph: GraphModule, given: Sequence[Any], **kwargs: Any) -> Any:
            if kwargs.get("is_backward"):
                return backward_compiler(graph, given)
            return inductor_module().compile_fx_inner(graph, given, **kwargs)

        options["inner_compile"] = inner
    with _backward_as_eager():
        compile_fx = inductor_module().compile_fx
        return cast("Callable[..., Any]", compile_fx(gm, inputs, config_patches=patches, **options))


def inductor_graph(gm: GraphModule) -> Callable[..., Any]:
    """Compiles a graph of aten ops with Inductor; it takes its inputs as one list, which it may empty."""
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    compiled = inductor_module().compile_fx_inner(gm, inputs)
    return boxed(lambda args: compiled(args))


def backend_error(error: BaseException) -> BaseException:
    """What a Dynamo backend raised, which Dynamo wraps in many lines; any other error is itself."""
    return error.inner_exception if isinstance(error, _BackendCompilerFailed) else error


def is_tracing_error(error: BaseException) -> bool:
    """Whether torch.compile raises it for code or arguments that it cannot trace."""
    return isinstance(error, _TorchDynamoException)


@contextmanager
def quiet_tracing() -> Iterator[None]:
    """Without what torch logs of an op that fails on tensors without data, since the error says the same."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def is_broken_off(gm: GraphModule) -> bool:
    """Whether Dynamo ends its graph before the code does."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def storage_id(value: object) -> int:
    """The same for tensors that share memory, fake ones too; 0 for what has none of its own."""
    try:
        return int(cast(Any, value).untyped_storage()._cdata) if isinstance(value, torch.Tensor) else 0
    except (RuntimeError, NotImplementedError):  # a nested or sparse tensor
        return 0


def fake_mode_of(values: Sequence[Any]) -> AbstractContextManager[Any]:
    """The mode of the first fake tensor among the values."""
    modes = (value.fake_mode for value in values if isinstance(value, _FakeTensor))
    return cast("AbstractContextManager[Any]", next(modes, nullcontext()))


def by_name(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call under the names of the op's schema, defaults filled in."""
    known = op._schema.arguments
    bound = {arg.name: arg.default_value for arg in known if arg.has_default_value()}
    return bound | {arg.name: value for arg, value in zip(known, args, strict=False)} | dict(kwargs)


def is_view(op: OpOverload) -> bool:
    """Whether the op's result is its input's data, by its schema."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in op._schema.returns)


def argument_index(op: OpOverload, *names: str) -> tuple[int, str] | None:
    """Place and name of the first argument of the op that has one of the names."""
    found = ((place, arg.name) for place, arg in enumerate(op._schema.arguments) if arg.name in names)
    return next(found, None)


def expression(value: Any) -> Any:
    """The sympy expression of a SymInt, SymFloat or SymBool, as what is known of its symbols simplifies it.

    A nested tensor's ragged size has none and gives its text.
    """
    return value.node.expr if hasattr(value.node, "expr") else str(value)


def hint(value: int | torch.SymInt, fallback: int = 4096) -> int:
    """The value that a size had when the graph was captured; the fallback, which is torch's, for an unbacked one."""
    if isinstance(value, int):
        return value
    if not hasattr(value.node, "expr"):
        return fallback
    known = value.node.shape_env.backed_var_to_val
    found = value.node.expr.subs({symbol: known[symbol] for symbol in value.node.expr.free_symbols if symbol in known})
    return int(found) if found.is_Integer else fallback


def symbol_hints(value: Any) -> dict[str, int]:
    """The symbols in a symbolic value and the values they had when the graph was captured; unbacked ones left out."""
    if not hasattr(value.node, "expr"):
        return {}
    known = value.node.shape_env.backed_var_to_val
    return {str(symbol): int(known[symbol]) for symbol in value.node.expr.free_symbols if symbol in known}


class _NamedShapeEnv(_ShapeEnv):
    def _generate_unique_id(self, source_name: str) -> int:
        return int(source_name.removeprefix("s"))


class FakeRun:
    """Runs ops on fake tensors whose sizes may be symbols of chosen names and values."""

    def __init__(self) -> None:
        self.shape_env = _NamedShapeEnv()
        self.mode = _FakeTensorMode(shape_env=self.shape_env)

    def symbol(self, name: str, value: int) -> torch.SymInt:
        """A symbol named `s` and a number; it stands for a size if `value` is at least 2, else for any integer."""
        create = self.shape_env.create_symbol if value >= 2 else self.shape_env.create_unspecified_symbol
        source = _ConstantSource(name)
        symbol = create(value, source, _DimDynamic.DYNAMIC)
        return cast(torch.SymInt, self.shape_env.create_symintnode(symbol, hint=value, source=source))

    def empty(self, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: str) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=device)

    def call(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self.mode, torch.no_grad():
            return target(*args, **kwargs)


def settings() -> tuple[str, ...]:
    """What AOTAutograd and Inductor are set to."""
    return tuple(cast(Any, config).get_hash().hex() for config in (_functorch_config, _inductor_config))


def inductor_cache_dir() -> str:
    """The folder of Inductor's compile cache."""
    return _cache_dir()


def is_handed_object(value: Any) -> bool:
    """Whether a graph input stands for a Python object, as AOTAutograd hands the mesh of a DTensor through."""
    return isinstance(value, _FakeScriptObject)


def schedule_actions(name: str, ranks: int, microbatches: int, per_rank: int) -> list[list[tuple[str, int, int]]]:
    """What each rank computes in turn, by the schedule class of that name: kind, stage and micro-batch."""
    stage: Any = SimpleNamespace(group_rank=0, group_size=ranks, num_stages=ranks * per_rank, submod=None)
    schedule = _schedules.get_schedule_class(name)([stage] * per_rank, microbatches)
    order = cast("dict[int, list[Any]]", cast(Any, schedule).pipeline_order)
    made: list[list[tuple[str, int, int]]] = []
    for rank in range(ranks):
        found = [part for each in order[rank] if each is not None for part in (each.sub_actions or (each,))]
        made.append([(a.computation_type.value, a.stage_index, a.microbatch_index) for a in found])
    return made


def with_messages(order: Sequence[Sequence[tuple[str, int, int]]], where: Sequence[int]) -> list[list[Any]]:
    """Puts sends and receives between the computations of each rank, where stage `i` is on rank `where[i]`.

    Actions are torch's, tuples of stage, kind and micro-batch; kinds are also SEND_F, RECV_F, SEND_B and RECV_B.
    """
    kinds = _schedules._ComputationType
    made = {
        rank: [_schedules._Action(stage, kinds(kind), part) for kind, stage, part in actions]
        for rank, actions in enumerate(order)
        if actions
    }
    found = _schedules._add_send_recv(made, lambda stage: where[stage], len(where))
    return [list(found.get(rank, [])) for rank in range(len(order))]


class PipelineRuntime(_schedules._PipelineScheduleRuntime):
    """torch's runtime of pipeline schedules for stages that prepare themselves.

    A stage has what the runtime reads: `stage_index`, `num_stages`, `group_rank`, `group_size`, `submod`, `is_first`,
    `is_last`, and `get_{fwd,bwd}_{send,recv}_ops(microbatch)`. `order` is what `with_messages` makes, and `compute` is
    called for each computation with its kind, stage and micro-batch.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        order: Sequence[Sequence[Any]],
        where: Sequence[int],
        microbatches: int,
        compute: Callable[[str, int, int], None],
    ) -> None:
        kinds = _schedules._ComputationType
        super().__init__(list(stages), microbatches, backward_requires_autograd=False)  # type: ignore[no-untyped-call]

        def run(action: Any, ctx: Any) -> None:
            compute(action.computation_type.value, action.stage_index, action.microbatch_index)

        for kind in (kinds.FORWARD, kinds.FULL_BACKWARD, kinds.BACKWARD_INPUT, kinds.BACKWARD_WEIGHT):
            self.register_custom_function(kind, run)
        self.stage_index_to_group_rank = dict(enumerate(where))
        self.pipeline_order_with_comms = {rank: list(actions) for rank, actions in enumerate(order)}

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        pass

    def run(self) -> None:
        """Runs all micro-batches. What a computation raises comes through, without torch's log of the schedule."""
        before, _schedules.logger.disabled = _schedules.logger.disabled, True
        try:
            self._step_microbatches()
        finally:
            _schedules.logger.disabled = before


def wait_for(runtime: PipelineRuntime, forward: bool, stage: int, microbatch: int) -> None:
    """Waits for what a stage receives for a micro-batch, if another rank sends it."""
    works = runtime.fwd_recv_ops if forward else runtime.bwd_recv_ops
    if (stage, microbatch) in works:
        _schedules._wait_batch_p2p(works.pop((stage, microbatch)))


def trace_artifact(name: str, text: str) -> None:
    """Writes a text into the structured trace (TORCH_TRACE, tlparse), if there is one."""
    _trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def is_profiling() -> bool:
    """Whether a profiler records."""
    return bool(_autograd_profiler._is_profiler_enabled)
