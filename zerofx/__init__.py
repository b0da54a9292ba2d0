"""ZeRO-style sharded training as graph passes over torch.compile."""

from zerofx.agree import RankMismatchError
from zerofx.api import compile
from zerofx.clip import clip_grad_norm_
from zerofx.decide import MemoryLimitError
from zerofx.evaluate import eval_step
from zerofx.full_params import full_params
from zerofx.inspection import inspect
from zerofx.parallel import Mesh
from zerofx.pipeline import Pipeline, PipelineError
from zerofx.scaling import DynamicLossScale, LossScaleError
from zerofx.stage_report import pipeline_report
from zerofx.step import train_step

__all__ = [
    "DynamicLossScale",
    "LossScaleError",
    "MemoryLimitError",
    "Mesh",
    "Pipeline",
    "PipelineError",
    "RankMismatchError",
    "clip_grad_norm_",
    "compile",
    "eval_step",
    "full_params",
    "inspect",
    "pipeline_report",
    "train_step",
]
