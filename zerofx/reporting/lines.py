"""Stores texts that differ little: each line once, and of each text the runs of lines that it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Run = tuple[int, int]
"""The number of the first line, and how many lines follow one another from it on."""


class Lines:
    """Lines by number, in the order in which they were first seen: what a text shares with one before it is one run."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def runs(self, text: Sequence[str]) -> list[Run]:
        """Numbers the lines of a text."""
        return runs_of(self.known.setdefault(line, len(self.known)) for line in text)

    @property
    def all(self) -> list[str]:
        return list(self.known)


def runs_of(numbers: Iterable[int]) -> list[Run]:
    made: list[Run] = []
    for number in numbers:
        if made and sum(made[-1]) == number:
            made[-1] = made[-1][0], made[-1][1] + 1
        else:
            made.append((number, 1))
    return made


def numbers_of(runs: Iterable[Sequence[int]]) -> list[int]:
    return [number for first, count in runs for number in range(first, first + count)]


def text_of(lines: Sequence[str], runs: Iterable[Sequence[int]]) -> str:
    """The text that was numbered, with a newline behind each line."""
    return "".join(f"{lines[number]}\n" for number in numbers_of(runs))
