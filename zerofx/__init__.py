"""ZeRO-style sharded training as graph passes over torch.compile."""

from zerofx.agree import RankMismatchError
from zerofx.api import compile
from zerofx.background import Saving
from zerofx.clip import clip_grad_norm_
from zerofx.decide import MemoryLimitError
from zerofx.deepspeed import FromDeepSpeed, from_deepspeed
from zerofx.evaluate import eval_step
from zerofx.full_params import full_params
from zerofx.inspection import inspect
from zerofx.loading import Loaded, load
from zerofx.manifest import CheckpointError
from zerofx.parallel import Mesh
from zerofx.pipeline import Pipeline, PipelineError
from zerofx.planning.plan import plan
from zerofx.planning.report import Plan
from zerofx.publish import latest
from zerofx.saving import save
from zerofx.scaling import DynamicLossScale, LossScaleError
from zerofx.stage_report import pipeline_report
from zerofx.step import train_step
from zerofx.tensorboard import TensorBoard

__all__ = [
    "CheckpointError",
    "DynamicLossScale",
    "FromDeepSpeed",
    "Loaded",
    "LossScaleError",
    "MemoryLimitError",
    "Mesh",
    "Pipeline",
    "PipelineError",
    "Plan",
    "RankMismatchError",
    "Saving",
    "TensorBoard",
    "clip_grad_norm_",
    "compile",
    "eval_step",
    "from_deepspeed",
    "full_params",
    "inspect",
    "latest",
    "load",
    "pipeline_report",
    "plan",
    "save",
    "train_step",
]
