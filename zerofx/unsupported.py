"""What other libraries have and zerofx does not, by name, with what to do instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from zerofx.config import ConfigError

HYBRID, CONTEXT, EXPERT = "hybrid sharding (HSDP)", "context parallelism", "expert parallelism"
OFFLOAD = "offload"
STAGES = "stages per module"
WRAPPING = "wrapping of single modules"

MISSING: Mapping[str, str] = {
    HYBRID: "give zerofx.compile a mesh with one data-parallel dimension, named 'dp'",
    CONTEXT: "split the batch and not the sequence, over a mesh without a context-parallel dimension",
    EXPERT: "keep all experts on every rank, where stage=3 shards them like other parameters",
    OFFLOAD: "store less on each rank with stage=3, over more ranks if need be",
    STAGES: "give the whole model one stage, and take parameters out with ignored_params",
    WRAPPING: "leave it out, zerofx buckets what it gathers by size (bucket_mb)",
}
"""Features that zerofx does not have, and what to do without each."""

DATA_PARALLEL = ("dp", "dp_replicate", "dp_shard", "replicate", "shard", "ddp", "fsdp", "hsdp", "data", "data_parallel")
DIMENSIONS: Mapping[str, str] = {
    "cp": CONTEXT, "dp_shard_cp": CONTEXT, "context": CONTEXT, "context_parallel": CONTEXT,
    "ep": EXPERT, "expert": EXPERT, "expert_parallel": EXPERT,
}  # fmt: skip
"""Names of mesh dimensions that ask for a feature."""

WRAPPERS: Mapping[str, str] = {
    "DistributedDataParallel": "pass the model itself, zerofx reduces gradients",
    "DataParallel": "pass the model itself, and start one process for each device",
    "FullyShardedDataParallel": "pass the model itself, zerofx shards it",
    "FSDPModule": "pass the model without fully_shard, zerofx shards it",
    "DeepSpeedEngine": "pass the model itself, zerofx.compile(stage=3) takes the place of deepspeed.initialize",
}
"""Classes of torch and DeepSpeed that a model may be wrapped in, or made into."""

CONFIGURATION = "DeepSpeed's configuration: pass **zerofx.from_deepspeed(config).compile"
OPTIMIZER = "no part of compile: build it from model.parameters() afterwards"
UNNEEDED = "what zerofx does anyway: leave it out"
AHEAD = "FSDP's: prefetch is the number of buckets that are gathered ahead"
ARGUMENTS: Mapping[str, str] = {
    # FSDP2
    "reshard_after_forward": "FSDP2's word for the stage: True is stage=3 and False is stage=2",
    "shard_placement_fn": "FSDP2's choice of the dimension to shard, which zerofx makes itself: leave it out",
    "dp_mesh_dims": "FSDP2's: name the data-parallel dimension of the mesh 'dp'",
    "mp_policy": "FSDP2's: pass precision='bf16', and reduce_dtype",
    "offload_policy": OFFLOAD,
    # FullyShardedDataParallel
    "sharding_strategy": "FSDP's word for the stage: FULL_SHARD is stage=3, SHARD_GRAD_OP stage=2, NO_SHARD stage=0",
    "cpu_offload": OFFLOAD,
    "auto_wrap_policy": WRAPPING,
    "backward_prefetch": AHEAD,
    "forward_prefetch": AHEAD,
    "mixed_precision": "FSDP's: pass precision='bf16', and reduce_dtype",
    "ignored_modules": "FSDP's: pass their parameters as ignored_params",
    "ignored_states": "FSDP's: pass the parameters as ignored_params",
    "param_init_fn": "FSDP's name for init_fn: pass init_fn",
    "sync_module_states": "FSDP's name for sync_init: pass sync_init",
    "use_orig_params": UNNEEDED,
    "limit_all_gathers": UNNEEDED,
    "device_id": "FSDP's: move the model to its device before zerofx.compile",
    "device_mesh": "FSDP's name for mesh: pass mesh",
    "process_group": "FSDP's: pass mesh=DeviceMesh.from_group(process_group, device_type)",
    # DistributedDataParallel
    "device_ids": "DDP's: move the model to its device before zerofx.compile",
    "output_device": "DDP's: move the model to its device before zerofx.compile",
    "broadcast_buffers": "DDP's, where False is what zerofx does: average buffers yourself if ranks must share them",
    "init_sync": "DDP's name for sync_init: pass sync_init",
    "find_unused_parameters": UNNEEDED,
    "static_graph": UNNEEDED,
    "gradient_as_bucket_view": UNNEEDED,
    "bucket_cap_mb": "DDP's name for bucket_mb: pass bucket_mb",
    # DeepSpeed
    "config": CONFIGURATION,
    "config_params": CONFIGURATION,
    "ds_config": CONFIGURATION,
    "zero_optimization": CONFIGURATION,
    "zero_stage": "DeepSpeed's name for stage: pass stage",
    "model_parameters": OPTIMIZER,
    "optimizer": OPTIMIZER,
    "lr_scheduler": OPTIMIZER,
    "offload_optimizer": OFFLOAD,
    "offload_param": OFFLOAD,
    "reduce_bucket_size": "DeepSpeed's, in elements: pass bucket_mb, in MiB",
    "allgather_bucket_size": "DeepSpeed's, in elements: pass bucket_mb, in MiB",
    "stage3_param_persistence_threshold": "DeepSpeed's name for persist_below: pass persist_below",
    "gradient_accumulation_steps": "no part of compile: pass microbatches to zerofx.train_step, or call backward "
    "for each micro-batch, inside model.no_sync() but for the last one",
    "gradient_clipping": "no part of compile: pass clip to zerofx.train_step, or call clip_grad_norm_",
    "fp16": "DeepSpeed's: pass precision='fp16'; zerofx.train_step scales the loss, or torch.amp.GradScaler does",
    "bf16": "DeepSpeed's: pass precision='bf16'",
    # torch and others
    "mode": "torch.compile's: set torch._inductor.config instead",
    "options": "torch.compile's: set torch._inductor.config instead",
    "offload": OFFLOAD,
    "tp_size": "DeepSpeed's: pass mesh=zerofx.Mesh(dp=..., tp=...) and slice layers with parallelize_module",
    "ep_size": EXPERT,
    "cp_size": CONTEXT,
}
"""Arguments of other libraries: a missing feature, or what the argument is and what to do."""

IN_FORWARD: Mapping[str, str] = {
    r"got mixed torch\.Tensor and DTensor": "the forward mixes plain tensors with a DTensor: parameters that it reads "
    "as attributes, such as self.layer.weight, are whole, but self.parameters() and get_parameter() give the stored "
    "parts",
    r"GraphModule\(\).* has no attribute 'to_local'": "the forward reads a parameter inside a branch or body of "
    "torch.cond, while_loop, map or scan, which zerofx does not have: use Python's if and for, or torch.where",
}
"""Patterns of torch's errors for forwards that cannot run on stored parameters, and what to do."""


def explained(error: BaseException) -> str | None:
    """What to say of an error of a forward, where torch's own words do not show the cause."""
    return next((told for pattern, told in IN_FORWARD.items() if re.search(pattern, str(error))), None)


STEP_ARGUMENTS: Mapping[str, str] = {
    "gradient_accumulation_steps": "DeepSpeed's name for microbatches: pass microbatches",
    "gradient_clipping": "DeepSpeed's name for clip: pass clip",
    "max_norm": "clip_grad_norm_'s name for clip: pass clip",
    "max_grad_norm": "Hugging Face's name for clip: pass clip",
    "lr_scheduler": "DeepSpeed's name for scheduler: pass scheduler",
    "grad_scaler": "torch.amp's: pass loss_scale='dynamic', the step scales the loss itself",
    "scaler": "torch.amp's: pass loss_scale='dynamic', the step scales the loss itself",
}
"""Arguments of other libraries that belong to `zerofx.train_step`, and what to do."""


def without(feature: str) -> str:
    """The feature, that it is missing, and the remedy."""
    return f"{feature}, which zerofx does not have: {MISSING[feature]}"


def refuse_arguments(caller: str, given: Collection[str], known: Sequence[str], others: Mapping[str, str]) -> None:
    """Raises ConfigError for the first argument given, which the `caller` does not take.

    It takes the `known`; the `others` are those of other libraries.
    """
    for name in given:
        if name in others:
            told = others[name]
            raise ConfigError(f"{caller}({name}=...) is {without(told) if told in MISSING else told}")
        (close,) = difflib.get_close_matches(name, known, 1, cutoff=0.0)
        raise ConfigError(f"{caller} takes no argument {name!r}, only {', '.join(known)}: the closest one is {close!r}")


def refuse_stages(stage: object) -> None:
    """Raises ConfigError for a `stage` that is a mapping from modules, or a function of them."""
    if isinstance(stage, Mapping) or callable(stage):
        kind = type(stage).__name__
        raise ConfigError(f"zerofx.compile(stage=...) was given a {kind}, as for {without(STAGES)}")


def refuse_dimensions(names: Sequence[str], sizes: Sequence[int]) -> None:
    """Raises ConfigError for a mesh whose dimensions ask for a feature; one rank in a dimension asks for nothing."""
    for name, size in zip(names, sizes, strict=True):
        if size > 1 and name in DIMENSIONS:
            raise ConfigError(f"the mesh has a dimension {name!r} for {without(DIMENSIONS[name])}")
    data = [name for name in names if name in DATA_PARALLEL]
    if "dp" in data:
        data = [name for name, size in zip(names, sizes, strict=True) if name == "dp" or (name in data and size > 1)]
    if len(data) > 1:
        raise ConfigError(
            f"the mesh has the data-parallel dimensions {', '.join(map(repr, data))} for {without(HYBRID)}"
        )


def wrapper_of(kind: type) -> str | None:
    """The name of a known wrapper that a module's class is or derives from."""
    bases = [base.__name__ for base in kind.__mro__ if base.__module__.split(".")[0] in ("torch", "deepspeed")]
    return next((name for name in bases if name in WRAPPERS), None)
