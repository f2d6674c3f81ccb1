"""The pages in docs/: examples run and print what is shown, pictures are up to date."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
README = DOCS.parent / "README.md"
PICTURES = DOCS / "pictures"
# A block, and what it prints where the page shows it.
EXAMPLE = re.compile(
    r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#([^)]+))?\)")
# Raise these with what is added; they show that the patterns still find anything.
LEAST_PAGES, LEAST_EXAMPLES, LEAST_PICTURES = 7, 38, 4


def examples(page):
    """Yield (lines of the page before, code, what it prints) of a page's examples."""
    text = page.read_text(encoding="utf-8")
    for example in EXAMPLE.finditer(text):
        yield text.count("\n", 0, example.start(1)), example[1], example[2] or ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run_and_print_what_is_shown(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for lines_before, example, printed in examples(page):
        code = "\n" * lines_before + example  # so that a traceback names the page's line
        exec(compile(code, str(page), "exec"), names)
        assert capsys.readouterr().out == printed, f"{page.name}:{lines_before + 1}"


# What constructors take besides tuples, and what attributes are nevertheless.
ARGUMENTS = """
import numpy as np
import numpy.typing as npt
from kvferry import AttentionGroup, EngineSpec, LatentGroup, ModelSpec, StateGroup, StatePart
from kvferry.wire import TransferRequest

part = StatePart("ssm", [8, 4], "float32", shard_axis=0)
model = ModelSpec(
    [AttentionGroup(np.arange(2), 2, 4), LatentGroup([2], 8), StateGroup(range(3, 4), [part])]
)
engine = EngineSpec(
    "a", model, [4, 4, 4], ["NHD", "BND", "BS"], pp_layers=[[0, 4]], null_block_id=[None, 0, 0],
    head_ranges=[[(0, 2)], None, None], physical_blocks_per_block=[1, 1, 1], num_blocks=[9, 9, 9],
)
request = TransferRequest("r", [[7], np.arange(2), range(2)], (0, 4), [0, 0, 0])
shape: tuple[int, ...] = part.shape
layers: tuple[int, ...] = LatentGroup([2], 8).layers
parts: tuple[StatePart, ...] = StateGroup([3], [part]).parts
stages: tuple[tuple[int, int], ...] | None = engine.pp_layers
ids: npt.NDArray[np.integer] = request.blocks[0]
first: tuple[int, ...] = request.first_tokens
TransferRequest("r", [7, 3], (0, 4))  # type: ignore[list-item]
"""


def test_examples_are_typed(tmp_path, request):
    """What the pages show passes strict mypy, but for the signatures of their own few helpers."""
    pytest.importorskip("mypy")
    exec(ARGUMENTS.rpartition("\nTransferRequest(")[0], {})  # that last one is wrong
    (tmp_path / "arguments.py").write_text(ARGUMENTS, encoding="utf-8")
    for page in [*PAGES, README]:
        module = ""
        for lines_before, example, _ in examples(page):
            module += "\n" * (lines_before - module.count("\n")) + example
        (tmp_path / f"{page.stem}.py").write_text(module, encoding="utf-8")
    # Readers write such helpers without annotations; their bodies are checked all the same.
    options = ["--strict", "--allow-untyped-defs", "--allow-untyped-calls", "--config-file="]
    cache = request.config.cache.mkdir("mypy")  # the first run takes ten seconds, others two
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, f"--cache-dir={cache}", *tmp_path.glob("*.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_example_is_missed():
    assert len(PAGES) >= LEAST_PAGES
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    found = [len(EXAMPLE.findall(text)) for text in texts]
    assert found == [len(re.findall("```py", text)) for text in texts]
    assert sum(found) >= LEAST_EXAMPLES


@pytest.mark.parametrize("page", [*PAGES, README], ids=lambda page: page.stem)
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
