"""Hypothesis' strategies for models and for the configurations to run them with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from tests.fuzz.models import Op, Param, Spec, width_of

PLAIN = ("tanh", "gelu", "softmax", "detach", "round_trip")
NEEDS: dict[str, Any] = {
    "linear": lambda w, v: [(v, w)],
    "linear_bias": lambda w, v: [(v, w), (v,)],
    "matmul": lambda w, v: [(w, v)],
    "twice": lambda w, v: [(v, w)],
    "product": lambda w, v: [(v, w), (v, w)],
    "slice": lambda w, v: [(v + 1, w)],
    "scale": lambda w, v: [((), (w,), (1, w), (1,))[v % 4]],
    "shift": lambda w, v: [((), (w,), (1, w), (1,))[v % 4]],
    "total": lambda w, v: [((v, 2, 3), (), (0, 3) if v > 6 else (v, 1), (2, 1, v, 2))[v % 4]],
    "embed": lambda w, v: [(v, w)],
    "layer_norm": lambda w, v: [(w,), (w,)],
    "conv": lambda w, v: [(1, 1, 3)],
    "in_place": lambda w, v: [(v, w)],
    "no_grad": lambda w, v: [(v, w)],
    "cat_empty": lambda w, v: [(0, w)],
    "pinned": lambda w, v: [(v, w)],
}
"""The shapes of the parameters that each kind reads, on a value of width w, with another width v."""
DTYPES = ("float32", "float32", "float32", "bfloat16", "float64")
widths = st.integers(1, 9)
EXAMPLES = hypothesis.settings(
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
)
"""How examples are drawn, however many: none is kept, and the smallest that fails is shown."""


@dataclass(frozen=True)
class Setting:
    """How a model is sharded: arguments of zerofx.compile, with buckets in bytes and ranks."""

    stage: int = 3
    world: int = 2
    persist_below: int = 0
    bucket: int = 2**20
    prefetch: int = 1
    precision: str | None = None
    reduce_dtype: str | None = None
    recompute: float = 0.0
    keep: int = 0
    backend: str = "gloo"


@dataclass(frozen=True)
class Training:
    """How a sharded model is trained on real ranks: a loop of its own, or zerofx.train_step."""

    whole_step: bool = False
    microbatches: int = 1
    accumulate: str = "auto"
    optimizer: str = "sgd"
    clip: float | None = None
    fuse_optimizer: bool = False


settings = st.builds(
    Setting,
    stage=st.sampled_from((3, 2, 1, 0)),
    world=st.sampled_from((2, 3, 4, 1)),
    persist_below=st.sampled_from((0, 20)),
    bucket=st.sampled_from((2**20, 1, 64, 256)),
    prefetch=st.sampled_from((1, 0, 3)),
    precision=st.sampled_from((None, None, "bf16", "fp16", "fp32")),
    reduce_dtype=st.sampled_from((None, None, None, "fp32", "bf16")),
    recompute=st.sampled_from((0.0, 0.0, 0.5, 1.0)),
    keep=st.sampled_from((0, 0, 1, 3)),
    backend=st.sampled_from(("gloo", "nccl")),
)


def on_ranks(setting: Setting) -> Setting:
    """The same with what real ranks have: at least two of them, and no loss scale."""
    return replace(
        setting, world=max(2, setting.world), precision=None if setting.precision == "fp16" else setting.precision
    )


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    whole = draw(st.booleans())
    fused = whole and draw(st.integers(0, 3)) == 0
    return Training(
        whole_step=whole,
        microbatches=1 if fused else draw(st.sampled_from((1, 2, 3))),
        accumulate="auto" if fused else draw(st.sampled_from(("auto", "reduce", "defer"))),
        optimizer=draw(st.sampled_from(("sgd", "adamw"))),
        clip=None if fused else draw(st.sampled_from((None, 0.5))),
        fuse_optimizer=fused,
    )


class Drawing:
    """What has been drawn of a model so far."""

    def __init__(self, draw: st.DrawFn, dropout: bool) -> None:
        self.draw, self.params = draw, list[Param]()
        self.plain = (*PLAIN, "dropout") if dropout else PLAIN

    def param(self, shape: tuple[int, ...]) -> int:
        """A new parameter, or one that is there already and so is read again, or tied."""
        same = [number for number, param in enumerate(self.params) if param.shape == shape]
        if same and self.draw(st.integers(0, 2)) > 0:
            return self.draw(st.sampled_from(same))
        frozen = self.draw(st.integers(0, 4)) == 4
        self.params.append(Param(shape, self.draw(st.sampled_from(DTYPES)), frozen))
        return len(self.params) - 1

    def op(self, widths_so_far: list[int], nested: bool = False) -> Op:
        last = len(widths_so_far) - 1
        read = last - self.draw(st.integers(0, last)) if not nested else 0
        width = widths_so_far[read]
        alike = [number for number, each in enumerate(widths_so_far) if each == width]
        kinds = [*NEEDS, *self.plain]
        if not nested:
            kinds += ["add", "cat", "running", "stale", "checkpoint", "checkpoint"]
        kind = self.draw(st.sampled_from(kinds))
        if kind == "add":
            return Op(kind, (read, self.draw(st.sampled_from(alike))))
        if kind == "cat":
            return Op(kind, (read, self.draw(st.integers(0, last))))
        if kind == "checkpoint":
            inside, wide = list[Op](), [width]
            for _ in range(self.draw(st.integers(1, 3))):
                inside.append(self.op(wide, nested=True))
                wide = [width_of(inside[-1], wide, self.params)]
            return Op(kind, (read,), (), tuple(inside))
        shapes = NEEDS[kind](width, self.draw(widths)) if kind in NEEDS else []
        return Op(kind, (read,), tuple(self.param(shape) for shape in shapes))


@st.composite
def specs(draw: st.DrawFn, most: int = 6, dropout: bool = True) -> Spec:
    """A model that ends in a linear layer which trains, so that something does."""
    drawing, wide, ops = Drawing(draw, dropout), [draw(widths)], list[Op]()
    for _ in range(draw(st.integers(0, most))):
        ops.append(drawing.op(wide))
        wide.append(width_of(ops[-1], wide, drawing.params))
    drawing.params.append(Param((draw(widths), wide[-1])))
    ops.append(Op("linear", (len(wide) - 1,), (len(drawing.params) - 1,)))
    loss = (len(wide), *draw(st.lists(st.integers(1, len(wide)), max_size=2, unique=True)))
    for _ in range(draw(st.integers(0, 1))):
        drawing.params.append(Param((draw(widths), 2)))
    return Spec(wide[0], draw(st.integers(1, 4)), tuple(drawing.params), tuple(ops), loss)
