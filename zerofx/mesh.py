"""The axes over which ranks are arranged: names, sizes and group names, but no process group."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh; `group` is the name by which collectives address it."""

    name: str
    size: int
    group: str


@dataclass(frozen=True)
class ModelParallel:
    """The other ranks that hold parts of this rank's model, by the names of their process groups.

    `tensor` are those that hold slices of the same layers, `pipeline` those that hold other layers. `coordinates` is
    the place of this rank along each axis.
    """

    tensor: Axis = Axis("tp", 1, "")
    pipeline: Axis = Axis("pp", 1, "")
    coordinates: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes with more than one rank: what is added up over one after the other is added up over the model."""
        return tuple(axis for axis in (self.tensor, self.pipeline) if axis.size > 1)


@dataclass(frozen=True)
class Mesh:
    """Ranks in row-major order over `axes`. Holds no process group, so passes and their tests need none."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """A mesh whose group names are its axis names: `Mesh.of(dp=2, tp=2)`."""
        return cls(tuple(Axis(name, size, name) for name, size in sizes.items()))

    @property
    def world(self) -> int:
        return prod(axis.size for axis in self.axes)

    def axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(f"the mesh has the axes {[a.name for a in self.axes]}, not {name!r}")

    def axis_of_group(self, group: str) -> Axis:
        for axis in self.axes:
            if axis.group == group:
                return axis
        raise KeyError(f"the mesh has the groups {[a.group for a in self.axes]}, not {group!r}")

    def coordinate(self, rank: int, name: str) -> int:
        """The place of `rank` along the axis `name`."""
        stride = 1
        for axis in reversed(self.axes):
            if axis.name == name:
                return rank // stride % axis.size
            stride *= axis.size
        raise KeyError(f"the mesh has the axes {[a.name for a in self.axes]}, not {name!r}")

    def peers(self, rank: int, name: str) -> list[int]:
        """The ranks that share every other coordinate with `rank`, in order along the axis `name`."""
        others = [a.name for a in self.axes if a.name != name]
        here = [self.coordinate(rank, other) for other in others]
        return [r for r in range(self.world) if [self.coordinate(r, other) for other in others] == here]
