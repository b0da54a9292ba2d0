"""The forwards of compiled models in progress, and what they read of parameters outside of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from zerofx.gathered import LostWriteError, lost


class Lent(NamedTuple):
    """A gathered parameter that a graph has handed to Python code, as it was then."""

    what: str
    value: Tensor
    place: int
    version: int

    @classmethod
    def now(cls, what: str, value: Tensor) -> Lent:
        return cls(what, value, value.data_ptr(), 0 if value.is_inference() else value._version)

    def is_written(self) -> bool:
        return self[2:] != Lent.now(self.what, self.value)[2:]


class Running:
    """Forwards of compiled models in progress; reads outside of a graph are noted on the innermost one."""

    def __init__(self) -> None:
        self.eager_reads: list[dict[str, None]] = []
        self.lent: list[list[Lent]] = []

    @contextmanager
    def forward(self) -> Iterator[dict[str, None]]:
        """Collects the modules whose parameters are read outside of a graph meanwhile.

        Raises LostWriteError at the end where Python code has written to a gathered parameter that a graph lent it.
        """
        found: dict[str, None] = {}
        self.eager_reads.append(found)
        self.lent.append([])
        try:
            yield found
            for lent in self.lent[-1]:
                if lent.is_written():
                    raise LostWriteError(lost(lent.what))
        finally:
            self.eager_reads.pop()
            self.lent.pop()

    def lending(self, compiled: Callable[..., Any], places: Mapping[int, str]) -> Callable[..., Any]:
        """A compiled graph that notes which of its results are gathered parameters, in words by their places."""

        def call(*args: Any) -> Any:
            results = compiled(*args)
            if self.lent:
                self.lent[-1] += [Lent.now(what, results[place]) for place, what in places.items()]
            return results

        return call


RUNNING = Running()
