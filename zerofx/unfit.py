"""Says in one sentence what an error is, or why a function cannot be called or traced with what it was given."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RAISED = re.compile(r"""got \w+\((["'])(.*)\1\)""", re.DOTALL)
"""Where torch.compile quotes what an op has raised."""
REFUSED = re.compile(r"Developer debug context: \w+Error <[^>]*>: (.*)")


def in_one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def unfit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why the function does not take these arguments; empty where it does, or where that is not known."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # functions of C have no signature
        return ""
    return ""


def untraced(error: BaseException) -> str:
    """What an op has raised while torch.compile traced, or else what torch.compile says first, and the user's line."""
    text = str(error)
    head, _, rest = text.partition("Explanation:")
    first = (head.strip().splitlines() or [""])[0]
    why = " ".join(rest.partition("Hint:")[0].split())
    raised = RAISED.search(why) or REFUSED.search(text)
    told = raised[raised.lastindex or 0] if raised else f"{first}{': ' if why else ''}{why}"
    places = re.findall(r'File "([^"]+)", line (\d+)', text.partition("from user code:")[2])
    return f"{told.strip().rstrip('.')}" + (f" ({places[-1][0]}:{places[-1][1]})" if places else "")
