"""The image of examples/container has all kernels that its users need: the parts of its Dockerfile, run here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from packer.twin.kernel_folder import cache_folder

COMPILED = """
import os
from numba.core.caching import IndexDataCacheFile as File
load, save = File.load, File.save
def known(file):
    return File(os.environ["COMPILED"], file._index_name.removesuffix(".nbi"), file._source_stamp)
def loaded(file, key):
    found = load(file, key)
    if found is None and (found := load(known(file), key)) is not None:
        save(file, key, found)
    return found
def saved(file, key, data):
    save(file, key, data)
    save(known(file), key, data)
File.load, File.save = loaded, saved
"""
"""Keeps what is compiled in a second folder too, and takes from there what an earlier run of this test compiled: the
kernels that a command needs are what is tested."""
PROGRAM = f"""
{COMPILED}
import shlex, sys
os.cpu_count = lambda: 1
from packer.cli import run
sys.exit(max(run(shlex.split(line)) for line in sys.argv[1:]))
"""
"""Runs command lines of packer, each given as one argument, as on one core: a second process that compiles ahead would
end with this one, at any of its kernels."""


def test_the_kernels_of_the_image_are_those_that_commands_need(root: Path, tmp_path: Path) -> None:
    """What is run when the image is built compiles all; a user without a home then compiles nothing."""
    lines = (root / "examples/container/Dockerfile").read_text("utf-8").splitlines()
    image = {key: value for line in lines for key, value in re.findall(r"^ENV (\w+)=(.*)$", line)}
    assert {"NUMBA_CPU_NAME", "NUMBA_CACHE_DIR", "MPLCONFIGDIR"} <= set(image)
    own = {key: f"{tmp_path}{value}" if value.startswith("/") else value for key, value in image.items()}
    environment = os.environ | {key: value for key, value in own.items() if key != "PATH"}
    environment["COMPILED"] = str(cache_folder() or tmp_path)
    (tmp_path / "tmp").mkdir()

    def packer(*lines: str, **more: str) -> None:
        words = [sys.executable, "-c", PROGRAM, *lines]
        done = subprocess.run(words, env=environment | more, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    for line in lines:
        if line.startswith("RUN packer "):
            packer(line.removeprefix("RUN packer ").replace(" /tmp/", f" {tmp_path}/tmp/"))
    folder = Path(own["NUMBA_CACHE_DIR"]) / "kernels"
    built = set(folder.iterdir())
    assert any("advance" in each.name for each in built)
    homeless = {"HOME": "/nonexistent", "XDG_CACHE_HOME": ""}
    packer(
        "workload generate --adapters 9 --rates 0.1 --ranks 8 -o f.json",
        "solve f.json -o p.json",
        "evaluate p.json --seed 5",
        "evaluate p.json --router affinity --duration 60",
        "simulate f.json --max-loras 4",
        **homeless,
    )
    assert {each.name for each in folder.iterdir()} == {each.name for each in built}


def test_the_image_runs_without_root(root: Path) -> None:
    """The user is a number, so that Kubernetes can tell that it is not root, and comes after all that root does."""
    lines = (root / "examples/container/Dockerfile").read_text("utf-8").splitlines()
    user = lines.index("USER 65532:65532")
    assert not [line for line in lines[user:] if line.startswith(("RUN", "COPY"))]
    assert lines[-1] == 'ENTRYPOINT ["packer"]'
