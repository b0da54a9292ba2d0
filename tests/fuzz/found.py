"""Models and configurations in which the fuzz found a fault, by what it was."""

from __future__ import annotations

from tests.fuzz.drawn import Setting
from tests.fuzz.models import Op, Param, Spec

FOUND: dict[str, tuple[Spec, Setting]] = {
    "the text did not read back where a dim of one row has another stride": (
        Spec(
            width=8,
            rows=1,
            params=(Param((1, 8)), Param((1,)), Param((8,)), Param((6, 1))),
            ops=(
                Op("tanh", (0,)),
                Op("pinned", (0,), (0,)),
                Op("scale", (0,), (1,)),
                Op("scale", (1,), (1,)),
                Op("scale", (1,), (2,)),
                Op("layer_norm", (2,), (1, 1)),
                Op("linear", (6,), (3,)),
            ),
            loss=(7,),
        ),
        Setting(stage=2, bucket=1, reduce_dtype="bf16", backend="nccl"),
    ),
    "the text did not read back where a checkpointed region drops out": (
        Spec(
            width=4,
            rows=2,
            params=(Param((3, 4)), Param((2, 3))),
            ops=(Op("checkpoint", (0,), (), (Op("linear", (0,), (0,)), Op("dropout", (0,)))), Op("linear", (1,), (1,))),
            loss=(2,),
        ),
        Setting(recompute=1.0),
    ),
}
