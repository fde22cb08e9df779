"""Compiled kernels are used again exactly while nothing that they depend on has changed, wherever they are."""

from __future__ import annotations

import dis
import importlib
import os
import pkgutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from numba import njit
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

import packer
from packer.twin import kernel_cache
from packer.twin.engine.advance import advance
from packer.twin.kernel_cache import KernelLocator, stamp

SOURCE = """
LIMIT = 3

@njit
def inner(x):
    return x + 1

def outer(x):
    return inner(x) * LIMIT
"""


def outer_of(source: str) -> types.FunctionType:
    """The function `outer` of a module with this source."""
    namespace = {"njit": njit, "__name__": "packer.somewhere"}
    exec(source, namespace)
    found = namespace["outer"]
    assert isinstance(found, types.FunctionType)
    return found


def kernels() -> Iterator[Dispatcher]:
    """All kernels of the twin and the predictors."""
    for folder in ("twin", "predictors"):
        for found in pkgutil.walk_packages([str(Path(packer.__file__).parent.parent / folder)]):
            module = importlib.import_module(f"packer.{folder}.{found.name}")
            yield from (value for value in vars(module).values() if isinstance(value, Dispatcher))


def test_fields_may_be_called_like_functions() -> None:
    """A kernel that reads a field with its own name, or that of a function that calls it, has a stamp."""
    assert stamp(outer_of("def outer(server):\n    return server.outer\n"))
    circle = "@njit\ndef inner(x):\n    return x.outer\n\ndef outer(x):\n    return inner(x)\n"
    assert stamp(outer_of(circle))


@pytest.mark.parametrize(
    "change",
    [("x + 1", "x + 2"), ("LIMIT = 3", "LIMIT = 4"), ("@njit", "@njit(inline='always')"), ("(x) *", "(x) +")],
)
def test_a_change_of_what_a_kernel_depends_on_is_noticed(change: tuple[str, str]) -> None:
    """A callee, a constant, an option of a callee or the function itself changes the stamp."""
    assert stamp(outer_of(SOURCE)) != stamp(outer_of(SOURCE.replace(*change)))


def test_options_of_the_kernel_itself_are_noticed(tmp_path: Path) -> None:
    """The decorator is part of the stamp."""
    stamps = set()
    for k, options in enumerate(["", "(inline='always')", "(boundscheck=True)"]):
        path = tmp_path / f"module_{k}.py"
        path.write_text(f"from numba import njit\n\n@njit{options}\ndef kernel(x):\n    return x\n", "utf-8")
        namespace = {"__name__": "packer.somewhere"}
        exec(compile(path.read_text("utf-8"), path, "exec"), namespace)
        stamps.add(stamp(namespace["kernel"].py_func))
    assert len(stamps) == 3


def test_comments_and_places_do_not_matter() -> None:
    """A stamp is that of the code, not of the file."""
    assert stamp(outer_of(SOURCE)) == stamp(outer_of("\n# a comment\n" + SOURCE))


def test_every_kernel_is_kept_under_its_stamp() -> None:
    """The locator is in use."""
    locator = advance._cache._impl.locator
    assert isinstance(locator, KernelLocator)
    assert locator.get_source_stamp() == stamp(advance.py_func)


def test_names_of_globals_are_those_that_python_loads() -> None:
    """The names that go into a stamp are read from the bytecode as `dis` reads it."""

    def loaded(code: types.CodeType) -> set[str]:
        own = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
        return own.union(*(loaded(each) for each in code.co_consts if isinstance(each, types.CodeType)))

    for kernel in kernels():
        code = kernel.py_func.__code__
        assert kernel_cache._names(code) == sorted(loaded(code))


def test_all_that_kernels_use_is_defined_before_them() -> None:
    """A global defined after its use would not be part of a stamp that is taken while its module is imported."""
    late = []
    for kernel in kernels():
        lines = Path(kernel.py_func.__code__.co_filename).read_text("utf-8").splitlines()
        for instruction in dis.get_instructions(kernel.py_func):
            if instruction.opname == "LOAD_GLOBAL":
                value = kernel.py_func.__globals__.get(instruction.argval)
                if isinstance(value, Dispatcher) and value.py_func.__module__ == kernel.py_func.__module__:
                    first = value.py_func.__code__.co_firstlineno
                    if first > kernel.py_func.__code__.co_firstlineno:
                        late.append(f"{kernel.py_func.__name__}: {lines[first - 1]}")
    assert not late


def test_functions_of_others_are_left_to_numba() -> None:
    """Kernels of other packages are kept where Numba keeps them."""
    for names in ({"__name__": "other"}, {}):  # what `exec` makes in an empty namespace has no module
        other = types.FunctionType((lambda: None).__code__, names)
        assert KernelLocator.from_function(other, "") is None


def test_processes_that_compile_at_once_never_load_each_others_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that read the index before the other wrote it keep their machine code apart."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    folder = kernel_cache.cache_folder()
    assert folder is not None
    first, second, later = (IndexDataCacheFile(str(folder), "kernel", "stamp") for _ in range(3))
    delayed = []
    with monkeypatch.context() as patch:
        patch.setattr(first, "_save_data", lambda name, data: delayed.append((name, data)))
        patch.setattr(second, "_load_index", dict)  # read before `first` wrote its own
        first.save("int64", "code for integers")
        second.save("float64", "code for floats")
    for name, data in delayed:
        first._save_data(name, data)
    assert later.load("float64") == "code for floats"
    assert later.load("int64") in (None, "code for integers")


def test_processes_that_need_a_kernel_at_once_compile_it_once(tmp_path: Path) -> None:
    """One of them compiles, the other waits and loads what it made."""
    program = (
        "import numpy\n"
        "from packer.twin.bursts import _relax\n"
        "input()\n"
        "_relax(numpy.ones(3), 0.5)\n"
        "print(sum(_relax.stats.cache_misses.values()))\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert sorted(int(process.communicate()[0]) for process in processes) == [0, 1]


def test_a_lock_that_can_not_be_opened_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file of locks belongs to others, kernels are compiled without it."""
    (tmp_path / ".lock").mkdir()
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(kernel_cache, "keeps", lambda: True)
    with kernel_cache.alone(advance.py_func):
        assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]


def test_kept_kernels_are_linked_without_what_only_compiling_needs() -> None:
    """A process that finds the engine compiled neither imports Numba's declarations nor compiles its runtime; it still
    can compile others."""
    program = (
        "import sys, numba, numpy, packer\n"
        "from numba.core.runtime.nrt import rtsys\n"
        "profile = packer.load_profile('h100-64gb/llama-3.1-8b-instruct')\n"
        "found = packer.simulate(packer.Workload([packer.Adapter('a', 8, 1.0)]), profile, max_loras=1, duration_s=60)\n"
        "declared = 'numba.np.arraymath' in sys.modules or rtsys._init\n"
        "print(found.engine_steps > 0, declared, numba.njit(lambda x: numpy.sum(x))(numpy.ones(3)))\n"
    )
    exec(program, {})  # keeps the kernels
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.split() == ["True", "False", "3.0"], run.stderr


def test_kept_code_is_loaded_ahead_and_nothing_is_compiled_for_it() -> None:
    """What is loaded ahead is what a simulation calls; for types without kept code nothing happens."""
    program = (
        "import numba, packer\n"
        "from packer.twin.engine.compile import advance, signature\n"
        "from packer.twin.kernel_cache import load\n"
        "profile = packer.load_profile('h100-64gb/llama-3.1-8b-instruct')\n"
        "found = lambda: packer.simulate(packer.Workload([packer.Adapter('a', 8, 1.0)]), profile, max_loras=1)\n"
    )
    exec(f"{program}found()", {})  # keeps the kernel
    program += "load(advance, (numba.int64,))\nload(advance, signature(advance))\nbefore = len(advance.overloads)\n"
    program += "print(before, found().completed > 0, len(advance.overloads), sum(advance.stats.cache_misses.values()))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.split() == ["1", "True", "1", "0"], run.stderr


def test_kept_code_that_names_a_module_that_is_gone_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept code names the modules of the kernels that it calls: an installed version may have moved one of them."""

    def gone(*_arguments: object) -> None:
        raise ModuleNotFoundError("No module named 'packer.twin.engine.gone'")

    cache = advance._cache
    monkeypatch.setattr(type(cache), "_load_overload", gone)
    assert cache.load_overload((), advance.targetctx) is None


@pytest.mark.parametrize("reading", [EOFError(), PermissionError(13, "Permission denied")])
def test_kept_code_that_can_neither_be_read_nor_discarded_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, reading: Exception
) -> None:
    """A file of a read-only folder that was cut short, or that is unreadable, is no error."""

    def raises(error: Exception) -> None:
        raise error

    cache = advance._cache
    monkeypatch.setattr(type(cache), "_load_overload", lambda *_: raises(reading))
    monkeypatch.setattr(type(cache), "flush", lambda _: raises(PermissionError(13, "Permission denied")))
    assert cache.load_overload((), advance.targetctx) is None
