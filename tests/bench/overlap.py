"""Foresees a GPT's step at stage 3 on a node of H100: `python -m tests.bench.overlap --layers 32`; no GPU is needed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from tests.bench.gpt import GPT, Size, elements
from zerofx.config import Config
from zerofx.planning.hardware import H100
from zerofx.program import Program
from zerofx.timeline import timeline
from zerofx.trace import trace

SEVEN_B = Size(layers=32, width=4096, heads=32, context=4096, vocabulary=32_000, micro_batch=1)


def traced(size: Size, config: Config, world: int) -> Program:
    """The step of each rank on one sequence, in bf16 autocast."""
    ids = torch.zeros(size.micro_batch, size.context, dtype=torch.long, device="meta")
    return trace(lambda: GPT(size), (ids, ids), config, world, autocast=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overlap", description=__doc__)
    parser.add_argument("--layers", type=int, default=SEVEN_B.layers)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--prefetch", type=int, default=Config().prefetch)
    parser.add_argument("--out", type=Path, default=Path(".cache/overlap"), help="where timeline.svg and .json go")
    given = parser.parse_args()
    size = replace(SEVEN_B, layers=given.layers)
    found = timeline(traced(size, Config(prefetch=given.prefetch), given.ranks), H100)
    given.out.mkdir(parents=True, exist_ok=True)
    found.draw(given.out / "timeline.svg")
    (given.out / "timeline.json").write_text(found.chrome_trace())
    peak = H100.peak["bf16"]
    print(
        f"{elements(size) / 1e9:.2f}e9 parameters on {given.ranks} ranks ({H100.name}): "
        f"step {found.step * 1e3:.1f} ms, computation {found.compute * 1e3:.1f} ms, "
        f"communication {found.communication * 1e3:.1f} ms, "
        f"exposed {found.exposed * 1e3:.1f} ms ({found.exposed_share:.1%}); "
        f"{found.flops / found.step / peak:.1%} of the peak FLOP/s\n{given.out}/timeline.svg, {given.out}/timeline.json"
    )


if __name__ == "__main__":
    main()
