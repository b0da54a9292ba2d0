"""ZeRO-style sharded training as graph passes over torch.compile."""

from zerofx.api import compile
from zerofx.inspection import inspect

__all__ = ["compile", "inspect"]
