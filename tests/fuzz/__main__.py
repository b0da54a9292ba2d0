"""Draws thousands of models and configurations and checks each: `python -m tests.fuzz --help`."""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, seed, settings
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

from tests.fuzz import drawn, ranks
from tests.fuzz.drawn import EXAMPLES
from tests.fuzz.simulated import check
from tests.pool import Pool

LINE_SECONDS = 30.0


@dataclass(frozen=True)
class Part:
    """Every `parts`-th example from the one at `place` on: all parts together check what one process would."""

    place: int = 0
    parts: int = 1

    @classmethod
    def read(cls, text: str) -> Part:
        place, _, parts = text.partition("/")
        if not (place.isdecimal() and parts.isdecimal() and 1 <= int(place) <= int(parts)):
            raise argparse.ArgumentTypeError(f"{text!r} is no part such as 1/4, the first of four")
        return cls(int(place) - 1, int(parts))


class Meter:
    """Counts examples: a bar on a terminal, else a line every half a minute."""

    def __init__(self, count: int, console: Console) -> None:
        self.count, self.console, self.done = count, console, 0
        self.start = self.told = time.monotonic()
        columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("examples", total=count)

    def tick(self) -> None:
        self.done += 1
        self.bar.update(self.task, completed=self.done)
        now = time.monotonic()
        if not self.console.is_terminal and now - self.told >= LINE_SECONDS:
            self.told = now
            left = (now - self.start) / self.done * max(0, self.count - self.done)
            self.console.print(f"{self.done} of {self.count} examples, {left / 60:.0f} min left")


def fuzz(count: int, number: int, part: Part, one: Callable[..., None], console: Console, **strategies: Any) -> int:
    """How many examples were checked. Raises the error of the smallest that fails, with a note of its program."""
    meter = Meter(len(range(part.place, count, part.parts)), console)
    places, failed = itertools.count(), list[Exception]()

    @seed(number)
    @settings(EXAMPLES, max_examples=count)
    @given(**strategies)
    def test(**example: Any) -> None:
        if not failed and next(places) % part.parts != part.place:
            return
        try:
            one(**example)
        except Exception as error:
            failed.append(error)
            error.add_note(program_of(one, example))
            raise
        meter.tick()

    with meter.bar:
        test()
    return meter.done


def program_of(one: Callable[..., None], example: dict[str, Any]) -> str:
    """A program that runs the example alone."""
    arguments = "".join(f"    {name}={value!r},\n" for name, value in example.items())
    imports = "from tests.fuzz.drawn import *\nfrom tests.fuzz.models import *\n"
    if isinstance(one, functools.partial):
        imports += "from tests.fuzz import ranks\nfrom tests.pool import Pool\n"
        return f"{imports}\nranks.check(\n    Pool,\n{arguments})\n"
    return f"{imports}from tests.fuzz.simulated import check\n\ncheck(\n{arguments})\n"


def on_ranks(count: int, number: int, part: Part, console: Console) -> int:
    """The same on real ranks."""
    pools = {world: Pool(world) for world in (2, 3, 4)}
    try:
        return fuzz(
            count,
            number,
            part,
            functools.partial(ranks.check, pools.__getitem__),
            console,
            spec=drawn.specs(dropout=False),
            setting=drawn.settings.map(drawn.on_ranks),
            training=drawn.trainings(),
        )
    finally:
        for pool in pools.values():
            pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=0, help="how many examples more to train on real ranks")
    parser.add_argument(
        "--seed", type=int, help="default: another one each time; the same seed draws the same examples"
    )
    parser.add_argument(
        "--part", type=Part.read, default=Part(), help="such as 1/4: check the first of four shares of the examples"
    )
    arguments = parser.parse_args()
    number = random.randrange(2**31) if arguments.seed is None else arguments.seed
    console = Console()
    console.print(f"seed {number}, {arguments.examples} examples")
    done = 0
    try:
        done += fuzz(
            arguments.examples, number, arguments.part, check, console, spec=drawn.specs(), setting=drawn.settings
        )
        if arguments.ranks:
            done += on_ranks(arguments.ranks, number, arguments.part, console)
    except Exception as error:
        console.print_exception(max_frames=8)
        console.print("\n".join(getattr(error, "__notes__", ())), markup=False, highlight=False, soft_wrap=True)
        sys.exit(f"seed {number}: an example fails")
    console.print(f"seed {number}: {done} examples without a failure")


if __name__ == "__main__":
    main()
