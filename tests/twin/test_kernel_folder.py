"""Compiled kernels are loaded only from a folder that this user alone can write to; without one, nothing waits."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit

from packer.errors import KernelsNotKeptWarning
from packer.twin import compile_ahead, kernel_folder
from packer.twin.bursts import _relax
from packer.twin.compile_ahead import Compiler, types_of
from packer.twin.engine import compile as engine
from packer.twin.engine.advance import advance
from packer.twin.flags import FLAGS
from packer.twin.kernel_folder import cache_folder, keeps, named_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that `NUMBA_CACHE_DIR` names; what is known of folders is forgotten before and after."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kernel_folder._place.cache_clear()
    kernel_folder.tell_once.cache_clear()
    yield tmp_path / "kernels"
    kernel_folder._place.cache_clear()
    kernel_folder.tell_once.cache_clear()
    kernel_folder._FULL.clear()


def kept(folder: Path) -> Any:
    """A kernel that doubles a number, and is kept in the folder when it is compiled."""
    source = folder.parent / "kernel.py"
    source.write_text("def twice(x):\n    return 2 * x\n", "utf-8")
    names: dict[str, object] = {"__name__": "packer.somewhere"}
    exec(compile(source.read_text("utf-8"), source, "exec"), names)
    return njit(**(FLAGS | {"cache": True}))(names["twice"])


def test_a_folder_that_is_made_is_ours_alone(folder: Path) -> None:
    """Whatever the umask says, others can't write to it."""
    before = os.umask(0)
    try:
        assert cache_folder() == folder
    finally:
        os.umask(before)
    assert keeps()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
def test_code_from_a_folder_that_others_write_to_is_not_loaded(folder: Path, mode: int) -> None:
    """The mode of a folder decides, and so does the target of a link to one."""
    target = folder.parent / "shared"
    target.mkdir()
    target.chmod(mode)
    folder.symlink_to(target)
    assert cache_folder() is None
    assert not keeps()
    assert "chmod go-w" in kernel_folder._place(folder).fault


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owner here")
@pytest.mark.parametrize(("owner", "loaded"), [(0, True), (4321, False)])
def test_code_of_another_user_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: int, loaded: bool
) -> None:
    """Root may have filled the folder; no one else."""
    folder.mkdir()
    folder.chmod(0o755)
    found = list(folder.stat())
    found[4] = owner
    monkeypatch.setattr(Path, "stat", lambda _self, **_more: os.stat_result(found))
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert (cache_folder() is not None) == loaded


def test_a_folder_that_can_only_be_read_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image has its kernels compiled when it is built, and a root that can't be written to."""

    def refused(_self: Path, **_more: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    folder.mkdir(0o755)
    monkeypatch.setattr(Path, "touch", refused)
    assert cache_folder() == folder
    assert not keeps()


def test_old_kernels_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of old versions do not gather; only a process that keeps a kernel looks through them."""
    old, young = (folder / name for name in ("old.nbi", "young.nbi"))
    folder.mkdir(0o755)
    old.touch()
    young.touch()
    os.utime(old, (0, 0))
    monkeypatch.setattr(kernel_folder.time, "time", lambda: young.stat().st_mtime + kernel_folder.KEPT_S)
    assert cache_folder() == folder
    assert old.exists()
    assert kept(folder)(3) == 6
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize("cache", ["", "cache", "./cache"])
def test_a_cache_in_the_working_folder_is_not_meant(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty or relative XDG_CACHE_HOME is as good as none."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert named_folder() == Path("/home/someone/.cache/packer/kernels")


def test_a_user_without_a_home_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder is made in the working folder."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "")  # of which Python makes the root folder
    assert not named_folder().is_absolute()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder() is None
    assert not Path("~").exists()


def test_a_full_folder_takes_no_more_and_the_kernel_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up ends nothing."""

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kernel = kept(folder)
    monkeypatch.setattr(kernel._cache._cache_file, "_save_index", full)
    with pytest.warns(KernelsNotKeptWarning, match=rf"{folder}: No space left on device"):
        assert kernel(3) == 6
    assert not keeps()
    assert kernel(3.5) == 7.0  # told once
    assert list(folder.glob("*.nb*")) == []


def test_an_index_of_another_version_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of packer share the folder: what one keeps may name modules that the other does not have."""
    kernel = kept(folder)
    file, loaded = kernel._cache._cache_file, []

    def strange() -> dict[object, str]:
        loaded.append(1)
        if len(loaded) < 3:
            raise ModuleNotFoundError("No module named 'packer.twin.engine.gone'")
        return {}

    monkeypatch.setattr(file, "_load_index", strange)
    assert kernel(3) == 6
    assert len(loaded) == 3
    assert any(folder.glob("*.nbc"))


def test_nothing_is_sent_to_a_process_that_could_not_keep_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder all is compiled here, and the engine waits for none of its parts."""
    folder.touch()
    compiler = Compiler()
    compiler.send(advance, ())
    monkeypatch.setattr(engine, "COMPILER", compiler)
    engine.begin.cache_clear()
    engine.prepare()
    assert compiler._process is None
    assert not compiler.has(advance)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="nothing is compiled elsewhere on a single core")
def test_a_kernel_that_the_process_has_compiled_and_not_kept_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may keep another version: the files of the installation were replaced meanwhile."""
    monkeypatch.setattr(compile_ahead, "is_kept", lambda _kernel: False)
    compiler = Compiler()
    compiler.send(_relax, types_of((np.ones(3), 0.5)))
    compiler.wait(_relax)
    assert compiler._process is not None
    compiler._process.kill()
    assert any(folder.glob("*._relax-*.nbi"))


PROGRAM = """
import sys, warnings
import packer
if sys.argv[1:]:
    from packer.cli import main
    try:
        main()
    except SystemExit as end:
        assert end.code == 0
warnings.simplefilter("ignore")
profile = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
fleet = packer.Workload([packer.Adapter("a", 8, 0.5), packer.Adapter("b", 16, 0.5)])
print(packer.solve(fleet, profile, predictor="tree", verify=False).evaluations[0])
"""
COMMAND = ("simulate", "examples/workloads/paper-256.csv", "--max-loras", "8", "--predictor", "tree", "--quiet")
"""Trees: their kernels compile in a fifth of the time that the engine takes."""


@pytest.fixture(scope="module")
def without_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A file that stands where the folder should be, and a process with it: a command, then calls from Python."""
    file = tmp_path_factory.mktemp("none") / "file"
    file.touch()
    return file, subprocess.run(
        [sys.executable, "-c", PROGRAM, *COMMAND],
        env=os.environ | {"NUMBA_CACHE_DIR": str(file)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_without_a_folder_the_same_is_computed(
    without_folder: tuple[Path, subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kernels are compiled in memory, and nothing waits for their files."""
    monkeypatch.setattr(sys, "argv", ["-c"])
    with warnings.catch_warnings():
        exec(PROGRAM, {})
    kept, (_, run) = capsys.readouterr(), without_folder
    assert run.stdout.endswith(kept.out), run.stderr
    assert kept.out.startswith("Evaluation(")
    assert kept.err == ""


def test_a_command_says_in_one_line_what_it_costs(
    without_folder: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """The line names the folder, what is wrong with it, the cost and what helps; later calls say nothing."""
    file, run = without_folder
    assert run.stderr.count("\n") == 1, run.stderr
    assert run.stderr.startswith(
        f"packer: compiled code can't be kept in {file}/kernels: Not a directory. Each command compiles it "
    )
