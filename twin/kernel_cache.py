"""Where compiled kernels are kept, and what makes them stale.

Numba stores a kernel next to its source file and notices changes of that file only. Kernels of this project call each
other across files, so a kernel is identified by its own bytecode and that of all that it calls, with the constants that
they use. The folder belongs to the user, so that other checkouts and installations find the same kernels compiled.
"""

from __future__ import annotations

import contextlib
import dis
import fcntl
import functools
import gc
import hashlib
import itertools
import linecache
import os
import pickle
import time
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import llvmlite.binding  # type: ignore[import-untyped]
import numba
import numpy as np
from numba.core.caching import CacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaNotImplementedError
from numba.core.runtime._nrt_python import c_helpers
from numba.core.runtime.nrt import rtsys
from numba.core.types import Array
from numba.core.typing.typeof import typeof_impl
from numba.np import numpy_support

from packer.twin.kernel_folder import cache_folder, full, keeps, named_folder, prune, tell_once

STAMP_LENGTH = 20  # Digits of the stamp in the name of a file.
_FLAGS: list[str] = []
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
"""Its argument is twice the index of the name, from Python 3.11 on; to ask `dis` for it takes ten times as long."""
LONGEST_S = 120.0  # Longest wait for a kernel that another process compiles, s.
POLL_S = 0.02


@functools.cache
def stamp(function: types.FunctionType) -> str:
    """Return a hash of all that the machine code of a kernel depends on."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for part in _parts(function):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _parts(function: types.FunctionType) -> Iterator[str]:
    yield function.__qualname__
    yield from _FLAGS
    yield from _decorator(function.__code__)
    yield repr(function.__defaults__)
    yield from _code_parts(function.__code__)
    closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield f"{name}={_meaning(function.__globals__[name])}"
    for name, cell in closed.items():
        yield f"{name}={_meaning(cell.cell_contents)}"


def _decorator(code: types.CodeType) -> Iterator[str]:
    """Yield the lines of the decorator, which name the options."""
    for number in itertools.count(code.co_firstlineno):
        line = linecache.getline(code.co_filename, number)
        if not line or line.startswith("def "):
            return
        yield line


def _code_parts(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_parts(constant)
        else:
            yield repr(constant)


def _names(code: types.CodeType) -> list[str]:
    """Return the global names of a code object and of those inside it, sorted, without the names of attributes."""
    found, operations, arguments = set[str](), code.co_code[::2], code.co_code[1::2]
    at = operations.find(_LOAD_GLOBAL)
    while at >= 0:
        number, first = arguments[at], at
        while first and operations[first - 1] == dis.EXTENDED_ARG:  # holds the high bits of the next one's argument
            first -= 1
            number |= arguments[first] << 8 * (at - first)
        found.add(code.co_names[number >> 1])
        at = operations.find(_LOAD_GLOBAL, at + 1)
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return sorted({*found, *inner})


def _meaning(value: object) -> str:
    """Return a text for the value of a global in a kernel, which changes when the value does."""
    if isinstance(value, Dispatcher):
        return f"{stamp(value.py_func)} {sorted(value.targetoptions.items())}"
    if isinstance(value, types.FunctionType):
        return stamp(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {value.tobytes().hex()}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}{getattr(value, '_fields', '')}"
    return repr(value) if not callable(value) else getattr(value, "__qualname__", type(value).__qualname__)


def is_kept(kernel: Dispatcher) -> bool:
    """Whether compiled code of this version of a kernel is in the folder, or none is needed (NUMBA_DISABLE_JIT)."""
    if not isinstance(kernel, Dispatcher):
        return True
    folder, cache = cache_folder(), getattr(kernel, "_cache", None)
    return folder is not None and isinstance(cache, KernelCache) and os.path.exists(folder / cache.index_name)


def load(kernel: Any, signature: tuple[Any, ...]) -> None:
    """Load a kernel for these types before its first call; nothing happens if no code for them is kept."""
    context = kernel.targetctx
    with global_compiler_lock:
        found = None if signature in kernel.overloads else kernel._cache.load_overload(signature, context)  # noqa: SLF001
        if found is not None:
            context.insert_user_function(found.entry_point, found.fndesc, [found.library])
            kernel.add_overload(found)


def _ours(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "packer"


class KernelLocator(_CacheLocator):
    """Where Numba finds the compiled code of one of our kernels, and under which name."""

    def __init__(self, function: types.FunctionType, folder: Path) -> None:
        self._stamp = stamp(function)
        self._py_file = function.__code__.co_filename  # for a message of Numba's
        self._folder = folder

    def get_cache_path(self) -> str:
        """Folder of the compiled kernels."""
        return str(self._folder)

    def get_source_stamp(self) -> str:
        """The value that must be equal for compiled code to be used."""
        return self._stamp

    def get_disambiguator(self) -> str:
        """Part of the file's name: versions of a kernel live side by side."""
        return self._stamp[:STAMP_LENGTH]

    @classmethod
    def from_function(cls, py_func: types.FunctionType, py_file: str) -> Self | None:
        """Return the locator of a kernel of this project; None for other functions and without a folder."""
        folder = cache_folder() if _ours(py_func) else None
        return None if folder is None else cls(py_func, folder)


class KernelCache(FunctionCache):
    """The cache of one kernel, created when it is first used: commands import many more kernels than they run."""

    def __init__(self, function: types.FunctionType) -> None:
        self._py_func = function

    def __getattr__(self, name: str) -> Any:
        if "_impl" not in vars(self):
            super().__init__(self._py_func)  # type: ignore[no-untyped-call]
        return object.__getattribute__(self, name)

    @property
    def index_name(self) -> str:
        """Name of the file that says which code is kept."""
        return f"{self._impl.filename_base}.nbi"


def _enable_caching(kernel: Any) -> None:
    """`Dispatcher.enable_caching`, with a cache of this file for kernels of this project."""
    if _ours(kernel.py_func):
        kernel._cache = KernelCache(kernel.py_func)  # noqa: SLF001
    else:
        _ENABLED(kernel)


_ENABLED: Callable[..., None] = Dispatcher.enable_caching


def _data_name(file: IndexDataCacheFile, number: int) -> str:
    """Return the name of a file of machine code that no other process uses. Numba numbers the files of a kernel by the
    index that it read. Two processes that compile two signatures of one kernel at once would take the same number, and
    one would then load the other's code."""
    name = _NUMBERED(file, number)
    if Path(file._cache_path) != cache_folder():  # noqa: SLF001
        return name
    return f"{name.removesuffix('.nbc')}.{uuid.uuid4().hex[:16]}.nbc"


_NUMBERED: Callable[[IndexDataCacheFile, int], str] = IndexDataCacheFile._data_name  # noqa: SLF001


@contextlib.contextmanager
def alone(function: types.FunctionType) -> Iterator[None]:
    """Keep other processes from compiling this kernel; wait for one that does, whose code is then found. A kernel is
    locked before those that it calls, so that processes never wait for each other in a circle."""
    file, place = _lock_file(cache_folder() if keeps() else None), int(stamp(function)[:15], 16)
    if file is not None:
        until_s = time.monotonic() + LONGEST_S
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                break
            time.sleep(POLL_S)
    try:
        yield
    finally:
        if file is not None:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


@functools.cache
def _lock_file(folder: Path | None) -> int | None:
    """A file in which a process locks one byte for each kernel. It stays open: closing it would release the locks."""
    if folder is None:
        return None
    try:
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # another user's
        return None
    try:
        # The places of kernels are below 2^60: no kernel has this byte.
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 2**61)
    except OSError:  # a file system without locks
        os.close(file)
        return None
    return file


def _compile(kernel: Any, signature: object) -> Any:
    """`Dispatcher.compile`, by one process at a time."""
    if not _ours(kernel.py_func):
        return _COMPILED(kernel, signature)
    if not (keeps() or is_kept(kernel)):
        tell_once()
    collects = gc.isenabled()
    gc.disable()  # the compiler's objects live until it ends
    try:
        # Numba's own lock comes first, as where a kernel compiles one that it calls.
        with global_compiler_lock, alone(kernel.py_func):
            return _COMPILED(kernel, signature)
    finally:
        if collects:
            gc.enable()


_COMPILED: Callable[..., Any] = Dispatcher.compile


@functools.cache
def _link_runtime() -> None:
    """Give the functions of Numba's runtime to code that is loaded. `rtsys.initialize` does the same, and compiles
    others, which only the compiler needs."""
    for name, address in c_helpers.items():
        llvmlite.binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def _typeof_array(array: Any, context: object) -> Any:
    """Numba's type of an array. Numba asks first whether it is masked, and imports `numpy.ma` for it."""
    if type(array) is np.ndarray:
        with contextlib.suppress(NumbaNotImplementedError):
            kind = numpy_support.from_dtype(array.dtype)
            return Array(kind, array.ndim, numpy_support.map_layout(array), readonly=not array.flags.writeable)
    return _TYPEOF_ARRAY(array, context)


_TYPEOF_ARRAY: Callable[..., Any] = typeof_impl.dispatch(np.ndarray)


def _load(cache: Any, signature: object, context: Any) -> Any:
    """`Cache.load_overload`, without Numba's declarations for our kernels: they are slow to import and only compile."""
    if _ours(cache._py_func):  # noqa: SLF001
        _link_runtime()
    else:
        context.refresh()
        rtsys.initialize(context)
    try:
        with cache._guard_against_spurious_io_errors():  # noqa: SLF001
            return cache._load_overload(signature, context)  # noqa: SLF001
    except (ImportError, AttributeError, OSError):  # a kernel that it calls was in another module then: compile again
        return None
    except (EOFError, pickle.UnpicklingError):  # a file was cut short: discard what is kept
        with contextlib.suppress(OSError):  # in a read-only folder it stays
            cache.flush()
        return None


def _save(cache: Any, signature: object, data: object) -> None:
    """`Cache.save_overload`; if the folder can't take a kernel, it gets no more, and the kernel is used unkept."""
    if not _ours(cache._py_func):  # noqa: SLF001
        _SAVED(cache, signature, data)
    elif keeps():
        try:
            try:
                _SAVED(cache, signature, data)
            except (ImportError, AttributeError, EOFError, pickle.UnpicklingError):
                cache.flush()  # the index is of another version of packer, or was cut short
                _SAVED(cache, signature, data)
            prune(named_folder())
        except OSError as error:
            full(error)
            tell_once()


_SAVED: Callable[..., None] = FunctionCache.save_overload


def install(*flags: dict[str, Any]) -> None:
    """Make Numba use the locator for this project's kernels; all other functions stay as they are. `flags`: flags that
    decorators name, which are part of every stamp."""
    _FLAGS[:] = map(repr, flags)
    # `NUMBA_CACHE_LOCATOR_CLASSES`, the public way, would replace the locators of all other functions.
    locators: list[Any] = CacheImpl._locator_classes  # noqa: SLF001
    if KernelLocator not in locators:
        locators.insert(0, KernelLocator)
        IndexDataCacheFile._data_name = _data_name  # type: ignore[method-assign]  # noqa: SLF001
        Dispatcher.enable_caching = _enable_caching  # type: ignore[assignment, method-assign]
        Dispatcher.compile = _compile  # type: ignore[assignment, method-assign]
        FunctionCache.load_overload = _load  # type: ignore[method-assign]
        FunctionCache.save_overload = _save  # type: ignore[method-assign]
        typeof_impl.register(np.ndarray, _typeof_array)
