"""ZeRO-style sharded training as graph passes over torch.compile."""

from zerofx.agree import RankMismatchError
from zerofx.api import compile
from zerofx.background import Saving
from zerofx.decide import MemoryLimitError
from zerofx.evaluate import eval_step
from zerofx.full_params import full_params
from zerofx.inspection import inspect
from zerofx.loading import Loaded, load
from zerofx.manifest import CheckpointError
from zerofx.publish import latest
from zerofx.saving import save
from zerofx.scaling import DynamicLossScale, LossScaleError
from zerofx.step import train_step

__all__ = [
    "CheckpointError",
    "DynamicLossScale",
    "Loaded",
    "LossScaleError",
    "MemoryLimitError",
    "RankMismatchError",
    "Saving",
    "compile",
    "eval_step",
    "full_params",
    "inspect",
    "latest",
    "load",
    "save",
    "train_step",
]
