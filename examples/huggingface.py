"""Trains a model of `transformers` with Hugging Face's `Trainer`, sharded by zerofx; weights are tiny and random.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/huggingface.py

`ShardedTrainer` is a Trainer whose model zerofx.compile has sharded: nothing is wrapped in DistributedDataParallel, all
else - loop, accumulation, clipping, schedules, logging, evaluation - is the Trainer's own. Without torchrun it trains
in one process. Needs `pip install 'zerofx[hf]'`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Trainer, TrainingArguments

import zerofx

VOCABULARY, LENGTH = 61, 16


class ShardedTrainer(Trainer):
    """A Trainer for a model that is compiled by zerofx; `zerofx` holds arguments of zerofx.compile."""

    def __init__(self, model: PreTrainedModel, args: TrainingArguments, zerofx: dict[str, Any], **others: Any) -> None:
        _refuse(args)
        model.to(args.device)
        super().__init__(model=_compiled(model, zerofx), args=args, **others)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """The model as it is, and told to Accelerate as prepared, so that neither puts it into another."""
        model._is_accelerate_prepared = True
        return model

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """All ranks gather; the first one writes whole weights, which `from_pretrained` reads."""
        whole = {name: _whole(value) for name, value in self.model.state_dict().items()}
        if self.args.should_save:
            with torch.no_grad():
                self.model.save_pretrained(output_dir or self.args.output_dir, state_dict=whole)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._save(output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        zerofx.save(folder, self.model, self.optimizer.optimizer, step=self.state.global_step)


def _compiled(model: PreTrainedModel, options: dict[str, Any]) -> PreTrainedModel:
    return zerofx.compile(model, **options)


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _refuse(args: TrainingArguments) -> None:
    """Raises ValueError for what the Trainer would do beside zerofx."""
    remedies = {
        "fsdp": "zerofx shards the model: leave it out",
        "deepspeed": "pass zerofx=dict(zerofx.from_deepspeed(config, args=args).compile)",
        "torch_compile": "zerofx compiles the model: leave it out",
        "fp16": "pass zerofx={'precision': 'bf16'}, or train with zerofx.train_step, which scales the loss",
        "bf16": "pass zerofx={'precision': 'bf16'}",
        "auto_find_batch_size": "give the batch size: a compiled model cannot be made again",
        "resume_from_checkpoint": "load the checkpoint with zerofx.load before trainer.train()",
    }
    for name, remedy in remedies.items():
        if getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}={getattr(args, name)!r}) does not go with zerofx: {remedy}")


def tiny_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **dropouts, **tokens))
    model.loss_type = "ForCausalLM"
    return model


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences that count upwards from a random number."""
    starts = torch.randint(0, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(0))
    ids = (starts + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: Path, steps: int, **others: Any) -> TrainingArguments:
    """Those of both ways to train: 8 rows a step over all ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=8 // ranks,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=0,
        **others,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path(".cache/huggingface"))
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--backend", default="inductor", help="of zerofx.compile")
    given = parser.parse_args()
    if not dist.is_initialized() and dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    options = {"stage": 3, "persist_below": 100, "backend": given.backend}
    wanted = arguments(given.folder, given.steps, gradient_accumulation_steps=given.accumulate)
    trainer = ShardedTrainer(tiny_model(), wanted, options, train_dataset=rows(256))
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (given.folder / "losses.json").write_text(json.dumps(losses))
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; whole weights in {given.folder}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
