"""What each key of DeepSpeed's JSON configuration means here: read, without effect, or refused.

Keys are written with dots; one that is not listed is taken for the section that it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zerofx.unsupported import EXPERT, HYBRID, OFFLOAD, without


class Refused(NamedTuple):
    """A key that asks for something unless it has one of the values `off`, and what to do instead."""

    off: tuple[Any, ...]
    remedy: str


ZERO = "zero_optimization"
READ: Mapping[str, str] = {
    f"{ZERO}.stage": "compile: stage",
    f"{ZERO}.reduce_bucket_size": "compile: bucket_mb, the smaller of both, from elements",
    f"{ZERO}.allgather_bucket_size": "compile: bucket_mb, the smaller of both, from elements",
    f"{ZERO}.stage3_param_persistence_threshold": "compile: persist_below",
    f"{ZERO}.stage3_prefetch_bucket_size": "compile: prefetch, 0 for 0 and else 1 bucket",
    "fp16.enabled": "compile: precision='fp16'",
    "fp16.loss_scale": "train_step: loss_scale, 0 is dynamic",
    "fp16.initial_scale_power": "train_step: DynamicLossScale(initial=2**n)",
    "fp16.loss_scale_window": "train_step: DynamicLossScale(window=)",
    "fp16.hysteresis": "train_step: DynamicLossScale(hysteresis=)",
    "fp16.min_loss_scale": "train_step: DynamicLossScale(minimum=)",
    "bf16.enabled": "compile: precision='bf16'",
    "torch_autocast.enabled": "compile: precision, of the dtype",
    "torch_autocast.dtype": "compile: precision",
    "communication_data_type": "compile: reduce_dtype",
    "gradient_clipping": "train_step: clip",
    "gradient_accumulation_steps": "train_step: microbatches",
    "train_batch_size": "checked against the other two, or gives train_step: microbatches",
    "train_micro_batch_size_per_gpu": "micro_batch, the rows of one; a step takes microbatches times as many a rank",
    "pipeline.stages": "compile: pipeline=zerofx.Pipeline(stages=); example_inputs are yours to give",
    "optimizer.type": "make_optimizer: Adam, AdamW, SGD or Adagrad of torch.optim",
    "optimizer.params": "make_optimizer: the optimizer's arguments",
    "scheduler.type": "make_scheduler: WarmupLR, WarmupDecayLR or WarmupCosineLR",
    "scheduler.params": "make_scheduler: the schedule's arguments",
}
"""Keys that have a meaning here, and where it is found."""

SIZED = "sizes its buffers differently: bucket_mb, prefetch and memory are the numbers here"
RELEASE = "released after the last use; memory= keeps parameters as far as they fit"
ALWAYS = "what zerofx does anyway"
REPORTS = "a report of DeepSpeed's: zerofx.inspect, zerofx.TensorBoard and torch.profiler show it"
STORAGE = "about DeepSpeed's files: zerofx.save writes torch.distributed.checkpoint's"
IGNORED: Mapping[str, str] = {
    f"{ZERO}.{name}": reason
    for reason, names in {
        ALWAYS: "contiguous_gradients reduce_scatter allgather_partitions overlap_comm use_multi_rank_bucket_allreduce "
        "memory_efficient_linear override_module_apply load_from_fp32_weights ignore_unused_parameters "
        "round_robin_gradients stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
        RELEASE: "stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold "
        "stage3_module_granularity_threshold leaf_module",
        SIZED: "sub_group_size stage3_partition_stream_chunk_size",
        STORAGE: "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "elastic_checkpoint pipeline_loading_checkpoint",
        REPORTS: "log_trace_cache_warnings enable_sanity_checks",
        "no part of this version of DeepSpeed's ZeRO": "legacy_stage1 save_muon_momentum_buffer_in_memory",
    }.items()
    for name in names.split()
} | {
    "fp16.auto_cast": "inputs are cast by autocast, where an op wants it",
    "bf16.immediate_grad_update": ALWAYS,
    "bf16.check_grad_overflow": "train_step skips where a loss scale is asked for",
    "zero_allow_untested_optimizer": "any optimizer of torch's goes",
    "zero_force_ds_cpu_optimizer": "optimizers are torch's",
    "steps_per_print": REPORTS,
    "wall_clock_breakdown": REPORTS,
    "memory_breakdown": REPORTS,
    "dump_state": REPORTS,
    "flops_profiler": REPORTS,
    "comms_logger": REPORTS,
    "tensorboard": REPORTS,
    "wandb": REPORTS,
    "comet": REPORTS,
    "csv_monitor": REPORTS,
    "checkpoint": STORAGE,
    "nebula": STORAGE,
    "aio": "about DeepSpeed's offload to files, which is refused where it is asked for",
    "compile": "zerofx compiles anyway",
    "graph_harvesting": "CUDA graphs are Inductor's to make",
    "pipeline.partition": "stages are balanced by time: Pipeline(split_at=) names where else to cut",
    "pipeline.seed_layers": ALWAYS,
    "pipeline.pipe_partitioned": ALWAYS,
    "pipeline.grad_partitioned": ALWAYS,
    "torch_autocast.lower_precision_safe_modules": "autocast goes by torch's own list of ops",
    "data_types.grad_accum_dtype": "gradients are added up in the dtype of their parameter",
    "seed": "torch.manual_seed is yours to call",
    "dataloader_drop_last": "your DataLoader's",
}
"""Keys without effect, and why."""

QUANTIZED = "a pass can do it, as examples/custom_pass.py does for all-gathers: leave the key out"
CHECKPOINTED = "use torch.utils.checkpoint in the model, or zerofx.compile(recompute=) or memory="
OFF: tuple[Any, ...] = (None, False, "none", 0, {})
REFUSED: Mapping[str, Refused] = {
    f"{ZERO}.offload_param": Refused(OFF, without(OFFLOAD)),
    f"{ZERO}.offload_optimizer": Refused(OFF, without(OFFLOAD)),
    f"{ZERO}.cpu_offload": Refused(OFF, without(OFFLOAD)),
    f"{ZERO}.cpu_offload_param": Refused(OFF, without(OFFLOAD)),
    f"{ZERO}.cpu_offload_use_pin_memory": Refused(OFF, without(OFFLOAD)),
    f"{ZERO}.zenflow": Refused(OFF, without(OFFLOAD)),
    f"{ZERO}.zero_hpz_partition_size": Refused((None, 0, 1), without(HYBRID)),
    f"{ZERO}.mics_shard_size": Refused((None, 0, -1), without(HYBRID)),
    f"{ZERO}.mics_hierarchical_params_gather": Refused(OFF, without(HYBRID)),
    f"{ZERO}.zero_quantized_weights": Refused(OFF, QUANTIZED),
    f"{ZERO}.zero_quantized_nontrainable_weights": Refused(OFF, QUANTIZED),
    f"{ZERO}.zero_quantized_gradients": Refused(OFF, "pass zerofx.compile(reduce_dtype='bf16')"),
    f"{ZERO}.zeropp_loco_param": Refused(OFF, "pass zerofx.compile(reduce_dtype='bf16')"),
    "fp16.consecutive_hysteresis": Refused(OFF, "leave it out: a window without overflow refills the hysteresis"),
    "fp16.fp16_master_weights_and_grads": Refused(OFF, "make the model half() before zerofx.compile"),
    "bf16.bf16_master_weights_and_grads": Refused(OFF, "make the model bfloat16() before zerofx.compile"),
    "bf16.bf16_optimizer_states": Refused(OFF, "make the model bfloat16() before zerofx.compile"),
    "amp": Refused(OFF, "NVIDIA's apex: pass precision='bf16' or 'fp16'"),
    "sparse_gradients": Refused(OFF, "make embeddings with sparse=False"),
    "prescale_gradients": Refused(OFF, "leave it out: gradients are averaged as they are reduced"),
    "gradient_predivide_factor": Refused((None, 1, 1.0), "leave it out: gradients are averaged as they are reduced"),
    "disable_allgather": Refused(OFF, "leave it out"),
    "activation_checkpointing": Refused(OFF, CHECKPOINTED),
    "pipeline.activation_checkpoint_interval": Refused(OFF, CHECKPOINTED),
    "sparse_attention": Refused(OFF, "use torch.nn.attention.flex_attention in the model"),
    "autotuning": Refused(OFF, "run `python -m zerofx tune`"),
    "elasticity": Refused(OFF, "load the checkpoint over other ranks with zerofx.load"),
    "data_efficiency": Refused(OFF, "your DataLoader's: zerofx takes the batches that it is given"),
    "curriculum_learning": Refused(OFF, "your DataLoader's: zerofx takes the batches that it is given"),
    "compression_training": Refused(OFF, "use torchao on the model before zerofx.compile"),
    "weight_quantization": Refused(OFF, "use torchao on the model before zerofx.compile"),
    "progressive_layer_drop": Refused(OFF, "drop layers in the model"),
    "eigenvalue": Refused(OFF, "leave it out"),
    "hybrid_engine": Refused(OFF, "generate inside `with zerofx.full_params(model)`"),
    "sequence_parallel_size": Refused((None, 1), "split the batch and not the sequence"),
    "tensor_parallel": Refused(OFF, "slice layers with parallelize_module, and pass mesh=zerofx.Mesh(dp=..., tp=...)"),
    "moe": Refused(OFF, without(EXPERT)),
}
"""Keys that ask for what zerofx does not have, or has by another name."""
