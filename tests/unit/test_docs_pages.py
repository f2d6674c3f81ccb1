"""The pages in docs/: examples run and print what is shown, pictures are up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PICTURES = DOCS / "pictures"
# A block, and what it prints where the page shows it.
EXAMPLE = re.compile(
    r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#([^)]+))?\)")
# Raise these with what is added; they show that the patterns still find anything.
LEAST_PAGES, LEAST_EXAMPLES, LEAST_PICTURES = 5, 34, 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run_and_print_what_is_shown(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, names = page.read_text(encoding="utf-8"), {"__name__": "__main__"}
    for example in EXAMPLE.finditer(text):
        lines_before = text.count("\n", 0, example.start(1))
        code = "\n" * lines_before + example[1]  # so that a traceback names the page's line
        exec(compile(code, str(page), "exec"), names)
        assert capsys.readouterr().out == (example[2] or ""), f"{page.name}:{lines_before + 1}"


def test_no_example_is_missed():
    assert len(PAGES) >= LEAST_PAGES
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    found = [len(EXAMPLE.findall(text)) for text in texts]
    assert found == [len(re.findall("```py", text)) for text in texts]
    assert sum(found) >= LEAST_EXAMPLES


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        linked = page.parent / target
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings]


def test_pictures_are_what_the_script_draws():
    drawn = runpy.run_path(str(PICTURES / "make.py"))["pictures"]()
    assert len(drawn) >= LEAST_PICTURES
    assert {path.name for path in PICTURES.glob("*.svg")} == set(drawn)
    for name, svg in drawn.items():
        assert (PICTURES / name).read_text(encoding="utf-8") == svg, f"run {PICTURES / 'make.py'}"
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"(pictures/{name})" in shown for name in drawn)
