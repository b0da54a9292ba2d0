"""ZeRO-style sharded training as graph passes over torch.compile."""

from zerofx.api import compile
from zerofx.full_params import full_params
from zerofx.inspection import inspect

__all__ = ["compile", "full_params", "inspect"]
