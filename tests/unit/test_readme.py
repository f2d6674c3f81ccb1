"""The README's Python example runs as it stands, and prints what it shows."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_example_runs(tmp_path, monkeypatch, capsys):
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    shutil.copy(ROOT / "tests/data/models/llama-3.1-8b.json", tmp_path / "config.json")
    monkeypatch.chdir(tmp_path)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
    shown = re.search(r"```text\n(rank 0 of .*?)```", readme, re.DOTALL)
    assert capsys.readouterr().out == shown[1]
