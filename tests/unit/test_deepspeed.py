"""Every key of a DeepSpeed configuration is read, without effect, or refused by its name with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zerofx
from zerofx import DynamicLossScale, Pipeline, from_deepspeed
from zerofx.config import Config, ConfigError
from zerofx.deepspeed_keys import IGNORED, READ, REFUSED, ZERO
from zerofx.deepspeed_rates import warmup, warmup_cosine, warmup_decay

TRAINER = SimpleNamespace(
    per_device_train_batch_size=3,
    gradient_accumulation_steps=5,
    max_grad_norm=0.7,
    learning_rate=0.02,
    weight_decay=0.1,
    adam_beta1=0.8,
    adam_beta2=0.9,
    adam_epsilon=1e-6,
    warmup_steps=10,
    max_steps=100,
    fp16=False,
    bf16=True,
)
SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 10, "warmup_max_lr": 1e-3}}
EXAMPLES: dict[str, tuple[dict[str, Any], str, Any]] = {
    f"{ZERO}.stage": ({ZERO: {"stage": 2}}, "stage", 2),
    f"{ZERO}.reduce_bucket_size": (
        {ZERO: {"reduce_bucket_size": 2**20, "allgather_bucket_size": 2**21}},
        "bucket_mb",
        4,
    ),
    f"{ZERO}.allgather_bucket_size": (
        {ZERO: {"allgather_bucket_size": 2**20}, "bf16": {"enabled": True}},
        "bucket_mb",
        2,
    ),
    f"{ZERO}.stage3_param_persistence_threshold": (
        {ZERO: {"stage3_param_persistence_threshold": 1e5}},
        "persist_below",
        100_000,
    ),
    f"{ZERO}.stage3_prefetch_bucket_size": ({ZERO: {"stage3_prefetch_bucket_size": 0}}, "prefetch", 0),
    "fp16.enabled": ({"fp16": {"enabled": True}}, "precision", "fp16"),
    "fp16.loss_scale": ({"fp16": {"enabled": True, "loss_scale": 128}}, "loss_scale", 128.0),
    "fp16.initial_scale_power": (
        {"fp16": {"enabled": True, "initial_scale_power": 4}},
        "loss_scale",
        DynamicLossScale(initial=16.0),
    ),
    "fp16.loss_scale_window": (
        {"fp16": {"enabled": True, "loss_scale_window": 7}},
        "loss_scale",
        DynamicLossScale(window=7),
    ),
    "fp16.hysteresis": (
        {"fp16": {"enabled": True, "hysteresis": 3}},
        "loss_scale",
        DynamicLossScale(hysteresis=3),
    ),
    "fp16.min_loss_scale": (
        {"fp16": {"enabled": True, "min_loss_scale": 2}},
        "loss_scale",
        DynamicLossScale(minimum=2.0),
    ),
    "bf16.enabled": ({"bf16": {"enabled": True}}, "precision", "bf16"),
    "torch_autocast.enabled": ({"torch_autocast": {"enabled": True}}, "precision", "bf16"),
    "torch_autocast.dtype": ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "precision", "fp16"),
    "communication_data_type": ({"communication_data_type": "bfloat16"}, "reduce_dtype", "bf16"),
    "gradient_clipping": ({"gradient_clipping": 1}, "clip", 1.0),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 4}, "microbatches", 4),
    "train_batch_size": ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2}, "microbatches", 12),
    "train_micro_batch_size_per_gpu": ({"train_micro_batch_size_per_gpu": 6}, "micro_batch", 6),
    "pipeline.stages": (
        {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 4},
        "pipeline",
        Pipeline(2, microbatches=4),
    ),
    "optimizer.type": ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "optimizer", torch.optim.SGD),
    "optimizer.params": ({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}, "lr", 0.1),
    "scheduler.type": ({"scheduler": SCHEDULE}, "schedule", "WarmupDecayLR"),
    "scheduler.params": ({"scheduler": SCHEDULE}, "total", 10),
}


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def found(told: zerofx.FromDeepSpeed) -> dict[str, Any]:
    optimizer, scheduler = told.optimizer, told.scheduler
    return {
        **told.compile,
        **told.train_step,
        "micro_batch": told.micro_batch,
        **({"optimizer": optimizer.kind, **optimizer.arguments} if optimizer else {}),
        **({"schedule": scheduler.name, **scheduler.arguments} if scheduler else {}),
    }


@pytest.mark.parametrize("key", READ)
def test_each_key_that_is_read_gives_its_argument(key: str) -> None:
    config, name, value = EXAMPLES[key]
    told = from_deepspeed(config, ranks=2)
    assert found(told)[name] == value
    assert found(from_deepspeed({})).get(name) != value
    Config(**{name: value for name, value in told.compile.items() if name != "pipeline"})
    assert not told.ignored


@pytest.mark.parametrize("key", IGNORED)
def test_each_key_without_effect_is_told_with_the_reason(key: str) -> None:
    told = from_deepspeed(nested(key, True))
    assert told.ignored == {key: IGNORED[key]} and f"without effect: {key}, {IGNORED[key]}" in str(told)
    assert found(told) == found(from_deepspeed({}))


@pytest.mark.parametrize("key", REFUSED)
def test_each_key_that_is_refused_says_its_name_and_a_remedy(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_deepspeed(nested(key, {"enabled": True} if REFUSED[key].off[1] is False else 5))
    assert f"{key} is " in str(refused.value) and REFUSED[key].remedy in str(refused.value)
    for off in (*REFUSED[key].off, "auto"):
        assert found(from_deepspeed(nested(key, off))) == found(from_deepspeed({}))


def test_sections_that_are_off_ask_for_nothing() -> None:
    off = {"cpu_checkpointing": False, "number_checkpoints": None, "partition_activations": False, "profile": False}
    zero = {"stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}
    told = from_deepspeed({"activation_checkpointing": off, ZERO: zero, "amp": {"enabled": False, "opt_level": "O1"}})
    assert told.compile == {"stage": 3}
    with pytest.raises(ConfigError, match=r"activation_checkpointing is .*torch.utils.checkpoint"):
        from_deepspeed({"activation_checkpointing": off | {"cpu_checkpointing": True}})
    with pytest.raises(ConfigError, match=r"offload_optimizer is .*zerofx does not have"):
        from_deepspeed({ZERO: {"offload_optimizer": {"device": "cpu", "pin_memory": True}}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "betas is 0.9: it must be a list of two numbers"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}, "params.lr is 'fast': it must be a number"),
        ({"optimizer": {"type": "Adam", "params": {"weight_decy": 0}}}, "weight_decy is 0: .* one is 'weight_decay'"),
        ({"optimizer": {"type": "Adam", "params": [3]}}, r"optimizer.params is \[3\]: it must be an object of keys"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "x"}}},
            "num_steps is 'x': it must be a num",
        ),
        ({"zero_optimization": [3]}, r"zero_optimization is \[3\]: it must be an object of keys, such as"),
        ({"pipeline": {"stages": "x"}}, "pipeline.stages is 'x': it must be an int, 1 or more"),
        ({"communication_data_type": [1]}, r"communication_data_type is \[1\]: it must be one of 'fp32'"),
        ({3: 4}, "the key 3 is no string"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation is .*the closest one is 'zero_optimization"),
        ({ZERO: {"stages": 3}}, "zero_optimization.stages is 3: .*'zero_optimization.stage'"),
        ({ZERO: {"stage": 4}}, "stage is 4: it must be one of 0, 1, 2, 3"),
        ({ZERO: {"stage": "3"}}, "stage is '3': it must be an int"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "choose one"),
        ({"fp16": {"enabled": "yes"}}, "must be true, false or 'auto'"),
        ({"gradient_clipping": -1}, "0 or more"),
        ({"communication_data_type": "int8"}, "one of 'fp32', 'bf16', 'fp16'"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "10: it is not 4 rows .* x 2 ranks"),
        ({"gradient_accumulation_steps": 0}, "1 or more"),
        ({"optimizer": {"type": "OneBitAdam"}}, "none of Adagrad, Adam, AdamW, SGD"),
        ({"optimizer": {"type": "AdamW", "params": {"momentum": 1}}}, "params.momentum is 1: torch.optim.AdamW takes"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "correct the bias"),
        ({"scheduler": {"type": "OneCycle"}}, "none of WarmupLR, WarmupDecayLR, WarmupCosineLR"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "needs total_num_steps"),
        ({"scheduler": {"type": "WarmupLR", "params": {"steps": 3}}}, "params.steps is 3: WarmupLR has"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
            "warmup_max_lr is 'auto': give a number, or transformers.TrainingArguments",
        ),
        (
            {"scheduler": SCHEDULE, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}},
            "the optimizer's lr is 0.5, .* make both the same",
        ),
    ],
)
def test_what_is_not_possible_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_deepspeed(config, ranks=2)


def test_auto_is_the_trainers_value_or_the_default() -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        ZERO: {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
    }
    rates = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    told = from_deepspeed(auto | {"scheduler": {"type": "WarmupDecayLR", "params": rates}}, args=TRAINER, ranks=2)
    assert told.compile == {"stage": 3, "precision": "bf16"}
    assert told.train_step == {"clip": 0.7, "microbatches": 5} and told.micro_batch == 3
    assert told.optimizer.arguments == {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    assert told.scheduler.arguments == {"low": 0.0, "steps": 10, "log": True, "total": 100}
    alone = from_deepspeed(auto, ranks=2)
    assert (alone.compile, dict(alone.train_step), alone.micro_batch) == ({"stage": 3}, {}, None)
    assert alone.optimizer.arguments == {}


def test_the_optimizer_and_the_schedule_are_torchs() -> None:
    params = {"lr": 1e-3, "betas": [0.5, 0.9], "weight_decay": 0.1, "torch_adam": True}
    told = from_deepspeed({"optimizer": {"type": "Adam", "params": params}, "scheduler": SCHEDULE})
    optimizer = told.make_optimizer([torch.nn.Parameter(torch.ones(3))])
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["betas"] == (0.5, 0.9)
    scheduler, rates = told.make_scheduler(optimizer), []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1e-3 * warmup_decay(0.0, 4, 10)(step) for step in range(11)])
    plain = from_deepspeed({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}})
    assert plain.optimizer.kind is torch.optim.Adam and plain.make_scheduler(optimizer) is None
    with pytest.raises(ConfigError, match="has no optimizer"):
        from_deepspeed({}).make_optimizer([])


def test_the_schedules_rise_and_fall() -> None:
    assert [warmup(0.5, 4, log=False)(step) for step in (0, 1, 3, 5, 9)] == [0.5, 0.5, 0.75, 1.0, 1.0]
    assert warmup(0.0, 8)(8) == pytest.approx(1.0)
    assert warmup_decay(0.0, 4, 12, log=False)(13) == 0.0
    assert warmup_cosine(0.0, 4, 12, end=0.25)(12) == 0.25


def test_a_file_is_read_and_the_result_is_frozen_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({ZERO: {"stage": 3, "overlap_comm": True}, "gradient_clipping": 1.0}))
    told = from_deepspeed(path)
    assert str(told).splitlines() == [
        "zerofx.compile(model, stage=3)",
        "zerofx.train_step(model, loss_fn, optimizer, clip=1.0)",
        "without effect: zero_optimization.overlap_comm, what zerofx does anyway",
    ]
    with pytest.raises(TypeError):
        told.compile["stage"] = 1
    for broken in ("[]", "{"):
        path.write_text(broken)
        with pytest.raises(ConfigError, match="from_deepspeed"):
            from_deepspeed(str(path))
    with pytest.raises(ConfigError, match="the path of a JSON file"):
        from_deepspeed(tmp_path / "none.json")
