"""The private torch APIs that zerofx uses are there, and take the parameters that it gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from zerofx import _torch

desc, config = _torch._desc, torch._inductor.config
CREATE = ("source", "dynamic_dim")
CALLS: dict[Any, tuple[str, ...]] = {
    _torch._aot_module_simplified: (
        *("mod", "args", "fw_compiler", "bw_compiler", "inference_compiler", "partition_fn"),
        "keep_inference_input_mutations",
    ),
    _torch.inductor_module().compile_fx: ("model_", "example_inputs_", "inner_compile", "config_patches"),
    _torch.inductor_module().compile_fx_inner: ("gm", "example_inputs"),
    _torch._schedules._PipelineScheduleRuntime._step_microbatches: ("arg_mbs", "losses"),
    _torch._schedules._PipelineScheduleRuntime._initialize_stages: ("args", "kwargs"),
    _torch._schedules._PipelineScheduleRuntime.register_custom_function: ("computation_type", "custom_function"),
    _torch._schedules._Action: ("stage_index", "computation_type", "microbatch_index", "sub_actions"),
    _torch._schedules._add_send_recv: ("compute_actions", "stage_to_rank", "num_stages"),
    _torch._schedules._wait_batch_p2p: ("work",),
    _torch._cache_dir: (),
    _torch._trace_structured: ("name", "metadata_fn", "payload_fn"),
    _torch.DeviceMesh._get_root_mesh: (),
    _torch._FakeTensorMode: ("shape_env",),
    _torch._ConstantSource: ("source_name",),
    _torch._ShapeEnv.create_symbol: CREATE,
    _torch._ShapeEnv.create_unspecified_symbol: CREATE,
    _torch._ShapeEnv.create_symintnode: ("sym", "hint", "source"),
    _torch._ShapeEnv._generate_unique_id: ("source_name",),
    _torch.CustomPartitionerFn.__call__: ("gm", "joint_inputs", "kwargs"),
    _torch.CustomPartitionerFn.uuid: (),
    _torch.CustomGraphPass.__call__: ("graph",),
    _torch.CustomGraphPass.uuid: (),
    desc.PlainAOTInput: ("idx",),
    desc.GradAOTOutput: ("grad_of",),
    desc.SubclassGetAttrAOTInput: ("base",),
    desc.SubclassGetAttrAOTOutput: ("base",),
    desc.TangentAOTInput: (),
    desc.InputMutationAOTOutput: ("mutated_input",),
    _torch._functorch_config.get_hash: (),
    _torch._inductor_config.get_hash: (),
    desc.SavedForBackwardsAOTOutput: (),
    desc.SavedForBackwardsNoVcCheckAOTOutput: (),
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_what_is_called_takes_the_parameters_given(function: Callable[..., Any]) -> None:
    assert set(CALLS[function]) <= set(inspect.signature(function).parameters)


def test_what_has_no_signature_takes_what_is_given() -> None:
    assert _torch._c10d._resolve_process_group.__doc__.startswith("_resolve_process_group(group_name: str)")
    assert _torch._skip_code((lambda: 0).__code__) is None


@pytest.mark.parametrize(
    ("owner", "attributes"),
    [
        (_torch._dynamo.config, ["skip_nnmodule_hook_guards", "recompile_limit"]),
        (_torch._dynamo.utils, ["counters"]),
        (_torch._functorch_config, ["activation_memory_budget", "backward_pass_autocast"]),
        (_torch._BackendCompilerFailed(None, ValueError(), None), ["inner_exception"]),
        (_torch._FakeTensorMode().from_tensor(torch.ones(1)), ["fake_mode"]),
        (torch.ones(1).untyped_storage(), ["_cdata"]),
        (_torch._c10d._world, ["pg_map"]),
        (_torch.DTensor, ["_local_tensor"]),
        (torch, ["_foreach_norm", "_foreach_mul_"]),
        (torch.optim.SGD([torch.ones(1)]), ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"]),
        (type(torch.optim.SGD([torch.ones(1)])).step, ["hooked", "__wrapped__"]),
        (torch.ones(1), ["_backward_hooks", "_post_accumulate_grad_hooks"]),
        (torch.autograd.Variable._execution_engine, ["queue_callback"]),
        (_torch._functorch_config, ["backward_pass_autocast"]),
        (config, ["custom_partitioner_fn", "post_grad_custom_pre_pass", "reorder_for_peak_memory"]),
        (config, ["force_disable_caches"]),
        (_torch._ShapeEnv(), ["backed_var_to_val"]),
        (_torch._DimDynamic, ["DYNAMIC"]),
        (torch.ops.aten.add.Tensor, ["_schema", "namespace"]),
    ],
)
def test_what_is_read_is_there(owner: Any, attributes: list[str]) -> None:
    assert [name for name in attributes if not hasattr(owner, name)] == []


def test_the_profiler_says_whether_it_records() -> None:
    assert _torch.is_profiling() is False
    with torch.profiler.profile():
        assert _torch.is_profiling() is True
