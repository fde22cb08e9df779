"""Kernels that only kernels call are compiled once, and any of their files may be missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError

from packer.twin.engine.containers import sift
from packer.twin.engine.emit import gap_bin
from packer.twin.engine.state import ADAPTER, PLACED
from packer.twin.flags import CALLED, FLAGS
from packer.twin.kernel_library import FASTER

MODULE = """
import sys, types
module = sys.modules["packer.of_a_test"] = types.ModuleType("packer.of_a_test")
exec('''
import numpy as np
from numba import njit
from numba.core.errors import TypingError
from numba.core.types.functions import BaseFunction
from packer.twin.flags import CALLED, ENGINE_FLAGS, FLAGS, INLINED
@njit(**INLINED)
def twice(x):
    return x + x
@njit(**CALLED)
def power(x, n):
    for _ in range(n):
        x = twice(x)
    return x
@njit(**CALLED)
def fill(values, x):
    for i in range(values.size):
        values[i] = power(twice(x), i) // (4 - values.size)
@njit(**INLINED)
def filled(values):
    fill(values, 3)
    return power(values[-1], 1)
@njit(**FLAGS)
def made(n):
    values = np.zeros(n, dtype=np.int64)
    return filled(values) + twice(values[0])
''', module.__dict__)
"""
PROGRAM = (
    MODULE
    + """
ALL = module.twice, module.power, module.fill, module.filled, module.made
print(module.made(3), module.made.stats.cache_hits)
try:
    module.made(4)
except ZeroDivisionError:
    print(*(each.py_func.__name__ for each in ALL if each.stats.cache_misses))
"""
)
OTHERS = """
from numba import njit
from packer.of_a_test import made
@njit(cache=True)
def more(n):
    return made(n) + 1
"""


def _name(file: Path) -> str:
    return file.name.partition("-")[0].rpartition(".")[2]


@pytest.fixture(scope="module")
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def compiled(_compiled_once: Path, forked_anew: Callable[..., list[str]], tmp_path: Path) -> None:
    """The kernels of the program are in the test's folder; all of them were compiled."""
    if not (_compiled_once / "kernels").exists():
        result, compiled = forked_anew(PROGRAM, _compiled_once)
        assert result.startswith("60 ")
        assert compiled == "twice power fill filled made"
    shutil.copytree(_compiled_once / "kernels", tmp_path / "kernels")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kept", [{"made"}, {"fill"}, {"filled"}, {"power"}, {"twice", "fill", "filled"}])
def test_a_kernel_needs_no_file_of_those_that_it_calls(
    kept: set[str], forked_anew: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """With the files of some kernels alone the others are compiled anew; results and errors are the same."""
    for file in (tmp_path / "kernels").glob("*.nb?"):
        if _name(file) not in kept:
            file.unlink()
    result, compiled = forked_anew(PROGRAM)
    assert result.startswith("60 ")
    assert not kept & set(compiled.split())
    assert ("made" in kept) == (compiled == "")


def test_only_kernels_call_what_has_no_wrapper() -> None:
    """Python gets an error, not a crash."""
    with pytest.raises(TypeError):
        gap_bin(0.5)
    with pytest.raises(TypeError):
        sift(np.zeros(4, PLACED), 2, np.zeros(3, ADAPTER), 0)


def test_other_compiled_functions_can_call_them() -> None:
    """Numba's own libraries link what is inlined, and find what is called."""
    assert njit(lambda gap_s: gap_bin(gap_s))(1e9) == njit(lambda gap_s: gap_bin(gap_s) + 1)(1e9) - 1


def test_integers_of_all_kinds_share_the_code() -> None:
    """A kernel that is called with a literal and with integers of 32 and of 64 bits is compiled once."""
    called = njit(**CALLED | {"cache": False})(lambda x: x + 1)
    caller = njit(**FLAGS | {"cache": False})(lambda values: called(3) + called(values[0]) + called(values.size))
    assert caller(np.ones(2, dtype=np.int32)) == 4 + 2 + 3
    assert [str(kind) for (kind,) in called.signatures] == ["int64"]


def test_functions_of_others_that_numba_keeps_find_what_they_call(
    forked_anew: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """A later process gets the same result, from a kept function or a new one."""
    (tmp_path / "others.py").write_text(OTHERS, "utf-8")
    program = f"{MODULE}\nsys.path.append({str(tmp_path)!r})\nfrom others import more\nprint(more(3))"
    assert [forked_anew(program) for _ in range(2)] == [["61"], ["61"]]


def test_what_makes_compiling_faster_is_for_kernels_alone() -> None:
    """Numba compiles other functions with its own parts, also after a kernel that has no types."""
    with pytest.raises(TypingError):
        njit(**FLAGS | {"cache": False})(lambda x: x.nothing + x)(1)
    found = [getattr(owner, name).__module__.partition(".")[0] for owner, name, _ in FASTER]
    assert found == ["numba"] * len(FASTER)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("ending", ["nbc", "nbi"])
def test_files_that_were_cut_short_are_replaced(
    ending: str, forked_anew: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """The kernel is compiled again, once."""
    results = []
    for size in (50, 0):
        for file in (tmp_path / "kernels").glob("*.nb?"):
            if _name(file) == "filled" and file.suffix == f".{ending}":
                file.write_bytes(file.read_bytes()[:size])
            elif _name(file) == "made":
                file.unlink()
        results += [forked_anew(PROGRAM), forked_anew(PROGRAM)]
    assert all(result.startswith("60 ") for result, _ in results)
    assert [compiled for _, compiled in results] == ["filled made", "", "filled made", ""]
