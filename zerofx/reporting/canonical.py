"""A program's text without what may differ between ranks that run the same: names, and values of symbols."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from zerofx.reporting.rows import statements

WORD = re.compile(r"'[^']*'|[A-Za-z_][\w.]*")
"""A string, which is left alone, or a name, with what is behind its dots."""
SYMBOL = re.compile(r"s\d+")
INPUT = re.compile(r"(\w+): sym\(")
VALUE = re.compile(r"(: sym\()(?:(.*), )?\d+\),$")
"""What an input says of the value that a symbol had when the program was captured."""


class Row(NamedTuple):
    """A row as it is compared, and as it is written."""

    compared: str
    written: str


@functools.lru_cache(maxsize=64)
def canonical(text: str) -> tuple[Row, ...]:
    """The rows of a program: inputs and outputs have one each, and names are numbered in their order.

    Sizes and offsets of the batch that nothing computes with are left out: an offset of 0 is no input, others are.
    """
    found, names = list[Row](), dict[str, str]()
    for kind, written in _used(list(statements(text))):
        if kind == "def":
            names = {}
        row = "symbols" if written.startswith("symbols(") else VALUE.sub(_without_value, written)
        if kind in ("input", "op"):
            names.setdefault(row.split(":")[0].strip(), f"n{len(names)}")
        renamed = functools.partial(_renamed, names)
        found.append(Row(WORD.sub(renamed, row), written.strip()))
    return tuple(found)


def _without_value(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2] or ''}),"


def _renamed(names: dict[str, str], found: re.Match[str]) -> str:
    word = found[0]
    return names.setdefault(word, f"n{len(names)}") if SYMBOL.fullmatch(word) else names.get(word, word)


def _used(rows: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The rows without inputs that are sizes or offsets and that no op reads, and without their gradients, None."""
    read = set(WORD.findall(" ".join(written for kind, written in rows if kind == "op")))
    sizes = {found[1] for kind, written in rows if kind == "input" and (found := INPUT.match(written.strip()))}
    for kind, written in rows:
        name = re.split(r"[:@,]", written.strip())[0].strip()
        if kind not in ("input", "output") or name not in (sizes - read) | {"None"}:
            yield kind, written
