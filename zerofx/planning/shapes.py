"""What a decoder-only transformer and the ranks it is trained on look like, as far as costs depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

NONE, SELECTIVE, FULL = range(3)
RECOMPUTE = ("none", "selective", "full")
"""What the backward computes again: nothing, attention's scores (Korthikanti et al., 2022), or each layer."""
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zbv")


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer.

    `ffn` is the width between the matrices of an MLP, `gated` that there are three of them (Llama), `positions` that
    positions are learned, `tied` that the head is the embedding, `dropout` that there
    are masks to keep.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    ffn: int | None = None
    kv_heads: int | None = None
    head_width: int | None = None
    gated: bool = False
    biases: bool = True
    positions: bool = True
    tied: bool = True
    dropout: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"Shape({name}={getattr(self, name)!r}) is not possible: give a number of 1 or more")
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_width", self.head_width or self.hidden // self.heads)

    @property
    def inner(self) -> int:
        """The width of all heads."""
        assert self.head_width is not None
        return self.heads * self.head_width

    @property
    def key_value(self) -> int:
        """The width of keys and values together."""
        assert self.kv_heads is not None and self.head_width is not None
        return 2 * self.kv_heads * self.head_width

    @property
    def mlp(self) -> int:
        """Elements of an MLP's matrices, over the hidden width."""
        assert self.ffn is not None
        return (3 if self.gated else 2) * self.ffn

    @property
    def matrices(self) -> int:
        """Elements of a layer's matrices, each of which multiplies every token."""
        return self.hidden * (2 * self.inner + self.key_value + self.mlp)

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        assert self.ffn is not None
        norms = 2 * self.hidden * (2 if self.biases else 1)
        biases = self.inner + self.key_value + self.ffn + 2 * self.hidden if self.biases else 0
        return self.matrices + norms + biases

    @property
    def embedding(self) -> int:
        """Parameters of the embeddings, of tokens and of positions."""
        return self.hidden * (self.vocabulary + (self.sequence if self.positions else 0))

    @property
    def head(self) -> int:
        """Parameters behind the layers: the last norm, and the head where it is not the embedding."""
        norm = self.hidden * (2 if self.biases else 1)
        return norm + (0 if self.tied else self.hidden * self.vocabulary)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.embedding + self.head


@dataclass(frozen=True)
class Layouts:
    """Ways of training over ranks, one in each place of arrays of one length (what is given once counts for all).

    Attributes:
        dp, tp, pp: data-, tensor- and pipeline-parallel ranks; tensor-parallel ones are neighbours, then data-parallel.
        stage: ZeRO's, 0 to 3.
        microbatch: sequences in a micro-batch of one rank.
        microbatches: micro-batches of one rank in a step.
        recompute: 0, 1 or 2, places in `RECOMPUTE`.
        schedule: a place in `SCHEDULES`.
        chunks: stages of a pipeline on each rank, more than 1 for the interleaved schedule.
        sequence_parallel: norms and dropouts are sliced over tensor-parallel ranks, too.
    """

    dp: Any
    tp: Any = 1
    pp: Any = 1
    stage: Any = 0
    microbatch: Any = 1
    microbatches: Any = 1
    recompute: Any = NONE
    schedule: Any = 0
    chunks: Any = 1
    sequence_parallel: Any = False

    def __post_init__(self) -> None:
        columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(getattr(self, each.name))) for each in fields(self)))
        for each, column in zip(fields(self), columns, strict=True):
            object.__setattr__(self, each.name, column.astype(bool) if each.name == "sequence_parallel" else column)

    def __len__(self) -> int:
        return len(self.dp)

    def __getitem__(self, places: Any) -> Layouts:
        return Layouts(*(getattr(self, each.name)[places] for each in fields(self)))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each layout as a dictionary, with names in place of numbers."""
        for row in zip(*(getattr(self, each.name).tolist() for each in fields(self)), strict=True):
            named = dict(zip((each.name for each in fields(self)), row, strict=True))
            yield named | {"recompute": RECOMPUTE[named["recompute"]], "schedule": SCHEDULES[named["schedule"]]}

    @property
    def world(self) -> Any:
        return self.dp * self.tp * self.pp
