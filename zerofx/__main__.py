"""The command line: `python -m zerofx passes` prints the table of passes."""

from __future__ import annotations

import argparse
import importlib

from zerofx.config import STAGES, Config
from zerofx.manager import Pass
from zerofx.recipe import recipe


def pass_table() -> str:
    """The default passes of all stages in their order, as a Markdown table."""
    stages: dict[str, list[str]] = {}
    passes: list[Pass] = []
    for stage in reversed(STAGES):
        place = 0
        for step in recipe(Config(stage=stage)):
            if step.name not in stages:
                passes.insert(place, step)
            place = [known.name for known in passes].index(step.name) + 1
            stages.setdefault(step.name, []).insert(0, str(stage))
    rows = ["| pass | level | stages | needs | ensures | what it does |", "|---|---|---|---|---|---|"]
    for step in passes:
        needs, ensures = (", ".join(sorted(i.name for i in kind)) or "-" for kind in (step.requires, step.ensures))
        does = (importlib.import_module(type(step).__module__).__doc__ or "").strip()
        rows.append(
            f"| `{step.name}` | {step.level.value} | {', '.join(stages[step.name])} | {needs} | {ensures} | {does} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zerofx", description=__doc__)
    parser.add_argument("command", choices=["passes"], help="what to print")
    parser.parse_args()
    print(pass_table())


if __name__ == "__main__":
    main()
