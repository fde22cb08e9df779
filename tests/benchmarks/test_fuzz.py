"""Whatever a file holds, its reader reads it or refuses it in words: a fixed set of cases of the long run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_fixed_set_of_cases_has_no_finding(root: Path, tmp_path: Path) -> None:
    """Damaged, odd and changed files of every reader: no other exception, no dead process, no long case."""
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, root / "benchmarks" / "fuzz" / "run.py", "--cases", "1500", "--json", out],
        capture_output=True,
        text=True,
        timeout=300,
    )
    figures = json.loads(out.read_text())
    assert figures["findings"] == [], done.stdout
    assert done.returncode == 0
    readers = figures["read"].keys() | figures["refused"].keys()
    assert len(readers) >= 30
    assert sum(figures["read"].values()) > 100
    assert sum(figures["refused"].values()) > 500


def test_a_finding_is_reported(root: Path, tmp_path: Path) -> None:
    """A reader that raises something else, and one that ends the process, are findings, and the run goes on."""
    code = (
        f"import sys; sys.path.insert(0, {str(root / 'benchmarks' / 'fuzz')!r})\n"
        "import os, run\n"
        "from targets import Target\n"
        "import mutate\n"
        "def bad(path):\n"
        "    data = open(path, 'rb').read()\n"
        "    if data == b'seed': return\n"
        "    if len(data) % 2: os.abort()\n"
        "    raise KeyError('x')\n"
        "run.targets = lambda: [Target('bad', 'f', b'seed', (mutate.raw,), bad)]\n"
        "found = run.contained(0, 0, 12)\n"
        "print(*found.findings, sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "bad: the process died" in done.stdout
    assert "bad: KeyError: 'x'" in done.stdout
