"""Saves in the background: from a copy in the host's memory, by a thread and over a group of its own."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerofx.manifest import CheckpointError


class Saving:
    """A save that goes on while training does."""

    def __init__(self, write: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.told = False
        self._write = write
        self._thread = threading.Thread(target=self._run, name="zerofx save")
        self._thread.start()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the checkpoint is there. Raises what zerofx.save raises, and TimeoutError after the seconds."""
        self._thread.join(timeout)
        if not self.done():
            raise TimeoutError(f"the save has not ended after {timeout} s")
        if self.error is not None:
            self.told = True
            raise self.error

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # it is raised where someone waits, and by the next save
            self.error = error
            warnings.warn(f"a save in the background failed: {error}", RuntimeWarning, stacklevel=1)


RUNNING: dict[str, Saving] = {}
"""The last save in the background, by the name of the group."""

GROUPS: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup, DeviceMesh]] = {}
"""By the name of a group: the group, one of the same ranks for threads, and that as a mesh of CPUs."""


def settle(group: dist.ProcessGroup | None) -> None:
    """Waits for the save before. Raises CheckpointError where it has failed and nobody was told."""
    before = RUNNING.pop(_name(group), None)
    if before is None or before.told:
        return
    try:
        before.wait()
    except BaseException as error:
        raise CheckpointError(f"the save before this one, in the background, failed: {error}") from error


def start(group: dist.ProcessGroup | None, write: Callable[[], None]) -> Saving:
    """Runs the write in a thread; the interpreter does not end before it."""
    saving = RUNNING[_name(group)] = Saving(write)
    return saving


def group_for_threads(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, DeviceMesh | None]:
    """A gloo group of the same ranks, which all of them make together at the first call."""
    if group is None:
        return None, None
    known = GROUPS.get(group.group_name)
    if known is None or known[0] is not group:
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        known = GROUPS[group.group_name] = group, own, DeviceMesh.from_group(own, "cpu")
    return known[1], known[2]


@torch.no_grad()
def copied(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """A copy in the host's memory, which training does not change."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    local = tensor.to_local().detach().to("cpu", copy=True)
    if mesh is None:  # the only rank, which has all of it
        return local
    if tensor.device_mesh.ndim > 1:
        raise CheckpointError(
            "a model over a mesh of several dimensions is not saved in the background: save it at once"
        )
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def _name(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else group.group_name
