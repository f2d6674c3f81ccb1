"""The README's Python example runs as it stands."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_example_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    shutil.copy(ROOT / "tests/data/models/llama-3.1-8b.json", tmp_path / "config.json")
    monkeypatch.chdir(tmp_path)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("rank 0 of 'decode' reads 4.375 MiB in 17,920 fragments")
