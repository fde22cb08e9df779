"""The command line starts fast because it imports late; which modules, not how long, is what is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packer.cli import cli

HEAVY = {
    "highspy", "jinja2", "joblib", "lightgbm", "matplotlib", "networkx", "numba", "ortools", "polars", "pulp",
    "scipy", "sklearn",
}  # fmt: skip

PROGRAM = """
import contextlib, io, json, sys
from packer.cli import run
loaded = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        code = run(words)
    top = {name.partition(".")[0] for name in sys.modules}
    loaded[" ".join(words)] = [code, sorted(top | {"numpy.ma"} & {*sys.modules})]
print(json.dumps(loaded))
"""


def _modules_after(*command_lines: list[str]) -> dict[str, tuple[int, set[str]]]:
    """Exit code, and top-level modules and `numpy.ma` if loaded, after each command line in turn, in one process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(command_lines)], capture_output=True, text=True, check=True
    )
    return {key: (code, set(names)) for key, (code, names) in json.loads(done.stdout).items()}


def test_help_imports_nothing_heavy() -> None:
    """`packer --help` loads click and the standard library: no numpy, no rich, nothing that takes long."""
    code, loaded = _modules_after(["--help"])["--help"]
    assert code == 0
    assert loaded & (HEAVY | {"numpy", "pydantic", "rich", "yaml"}) == set()


def test_help_of_no_command_imports_anything_heavy() -> None:
    """Every command's own help, and so shell completion, works without the numerical stack."""
    lines = [[name, "--help"] for name in cli.lazy]
    for line, (code, loaded) in _modules_after(*lines).items():
        assert code == 0, line
        assert loaded & HEAVY == set(), line


def test_the_first_answer_needs_no_optimiser(tmp_path: Path) -> None:
    """`packer solve FLEET` and the fewest GPUs by greedy import no optimiser, masked arrays, networkx or log reader."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("adapter,rank,rate\n" + "".join(f"a{i},8,0.05\n" for i in range(3)))
    lines = [["solve", str(fleet)], ["solve", str(fleet), "--objective", "gpus"]]
    for line, (code, loaded) in _modules_after(*lines).items():
        assert code == 0, line
        assert loaded & {"highspy", "networkx", "numpy.ma", "ortools", "pulp", "ssl"} == set(), line


@pytest.mark.parametrize("name", cli.lazy)
def test_every_command_has_a_short_help(name: str) -> None:
    """The help page shows a line for each command without importing it."""
    assert cli.lazy[name].endswith(".")


@pytest.mark.parametrize("given", [None, "2"])
def test_programs_that_a_command_starts_keep_their_threads(tmp_path: Path, given: str | None) -> None:
    """BLAS has one thread, unless the user says otherwise; a server or a command of the user has the user's setting."""
    program = (
        "import sys, threadpoolctl\n"
        "from packer.cli import main\n"
        "sys.argv = ['packer', '--version']\n"
        "try:\n    main()\n"
        "except SystemExit:\n    import numpy\n"
        "from packer.io.web import Address\n"
        "from packer.live.host import ShellCommand\n"
        "ShellCommand('echo ${OPENBLAS_NUM_THREADS-as it likes} > said', Address('http://x', '')).wait(9.0)\n"
        "print('BLAS', *{each['num_threads'] for each in threadpoolctl.threadpool_info()})\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment |= {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert f"BLAS {given or 1}" in done.stdout
    assert (tmp_path / "said").read_text() == f"{given or 'as it likes'}\n"
