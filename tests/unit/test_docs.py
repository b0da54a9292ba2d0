"""The programs in docs/ run as they stand, page by page, and the generated parts have a source for everything."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import zerofx

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "pages").rglob("*.md"))
PROGRAMS = [page for page in PAGES if "```python" in page.read_text()]


def generated() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.stem)
def test_the_programs_of_a_page_run_one_after_the_other(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": f"docs_{page.stem}"}
    module = type(pytest)(names["__name__"])
    monkeypatch.setitem(__import__("sys").modules, names["__name__"], module)
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for indent, block in blocks:
        program = re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)
        exec(compile(program, str(page), "exec"), vars(module))


def test_each_mark_is_written_and_each_pass_shown_before_and_after() -> None:
    generate = generated()
    marks = {name for page in PAGES for name in generate.MARK.findall(page.read_text())}
    assert {"passes", "invariants", "pass_reference", "missing", "arguments", "deepspeed_read"} <= marks
    for name in marks:
        assert generate.on_page_markdown(f"<!-- generate: {name} -->") == getattr(generate, name)() != ""
    reference = generate.pass_reference()
    assert reference.count("becomes") == len(generate.all_passes()) == reference.count("\n## ") + 1


def test_each_public_name_is_in_the_api() -> None:
    api = (DOCS / "pages" / "api.md").read_text()
    for name in zerofx.__all__:
        assert f"::: {getattr(zerofx, name).__module__}.{name}\n" in api, name
