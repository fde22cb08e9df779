"""How compiled kernels call each other: the code of each kernel goes through LLVM once.

Numba compiles every kernel to machine code, and links the code of what it calls into it, to be optimised and compiled
again. Here a kernel that only kernels call (`no_cpython_wrapper`) is either inlined into its callers (`forceinline`)
and never compiled alone, or compiled once and called by its symbol. Callers keep a copy of its machine code, so that no
file of a kernel needs another file.
"""

# ruff: noqa: SLF001 (Numba's libraries, extended here, have few public members)
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba.core import event
from numba.core.codegen import CPUCodegen, JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.cpu import CPUContext
from numba.core.dispatcher import Dispatcher
from numba.core.runtime.nrt import rtsys
from numba.core.targetconfig import ConfigStack
from numba.core.types import int64, signed_domain, unliteral
from numba.core.types.functions import BaseFunction
from numba.core.types.npytypes import Record

from packer.twin.kernel_cache import stamp

KEPT = "kernel"  # The kind under which these libraries are kept; Numba's own kinds are "object" and "bitcode".
MARK = "numba.dynamic.globals.kernels"
"""A variable in every kernel. Numba keeps no function that has a variable of this name: a kept function of other code
would not find the kernels that it calls by symbol."""
TYPE_ERROR = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value
"""The address that Python finds instead of a kernel that only kernels may call."""
SKIPPED = ("NopythonRewrites", "InlineClosureLikes", "AnnotateTypes")
"""Numba's passes that are skipped: kernels have no array expressions or closures, and no one reads listings."""


class KernelLibrary(JITCodeLibrary):
    """The code of one kernel, as LLVM's and as machine code.

    `inner`: only kernels call it; `inlined`: its callers contain it. `calls`: the machine code of all that is called
    from here, callees before their callers, by the symbols that it defines. `counts`: it counts references to arrays.
    """

    inner = inlined = counts = False
    _code: Any = None
    _bitcode: Any = None

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.enable_object_caching()
        self.calls: dict[tuple[str, ...], bytes] = {}
        self.symbols: tuple[str, ...] = ()

    def add_ir_module(self, ir_module: Any) -> None:
        """Add code, with the mark."""
        variable = ir.GlobalVariable(ir_module, ir.IntType(8), MARK)
        variable.linkage, variable.initializer = "weak_odr", ir.Constant(variable.value_type, 0)
        super().add_ir_module(ir_module)

    def _finalize_dynamic_globals(self) -> None:
        super()._finalize_dynamic_globals()
        self._dynamic_globals = [name for name in self._dynamic_globals if name != MARK]

    @property
    def codegen(self) -> Any:
        """Numba's code generator; for an inlined kernel the library itself."""
        return self if self.inlined else self._codegen

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing: inlined kernels have no Python objects."""

    def add_linking_library(self, library: Any) -> None:
        """Link a library, or only record the kernels that it calls."""
        if self.inlined and library is rtsys.library:
            return  # callers have it
        if isinstance(library, KernelLibrary):
            library._ensure_finalized()
            self.calls |= library.calls
            if (library.inner or library.counts) and not library.inlined:
                self.calls[library.symbols] = library._code
                return
        super().add_linking_library(library)

    def _optimize_functions(self, module: Any) -> None:
        """Optimise nothing: the passes over the whole module do the same again."""
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Optimise once; Numba does it twice, to count fewer references."""
        if self.counts:
            super()._optimize_final_module()
        else:
            passes, builder = self._codegen._module_pass_manager()
            passes.run(self._final_module, builder)

    def finalize(self) -> None:
        """Make the machine code; for an inlined kernel the module that callers contain."""
        if self.inlined:
            for library in self._linking_libraries:
                self._final_module.link_in(library._get_module_for_linking(), preserve=True)
            self._finalized = True
            return
        super().finalize()
        self.symbols = tuple(f.name for f in self._final_module.functions if not f.is_declaration)
        self._code = self._get_compiled_object()

    def get_pointer_to_function(self, name: str) -> Any:
        """Return the address of a function."""
        return super().get_pointer_to_function(name) or TYPE_ERROR

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None and self._bitcode is not None:
            self._shared_module = llvm.parse_bitcode(self._bitcode)
        return super()._get_module_for_linking()

    def serialize_using_object_code(self) -> tuple[str, str, Any]:
        """Return what is kept."""
        bitcode = self._get_module_for_linking().as_bitcode()
        return self.name, KEPT, (self.inner, self.counts, self._code, self.symbols, bitcode, self.calls)

    def _load(self, code: bytes, symbols: tuple[str, ...]) -> None:
        self._code, self.symbols = code, symbols
        self._set_compiled_object(code)
        self._finalize_final_module()
        self._codegen._engine._defined_symbols.update(symbols)

    @classmethod
    def of_kept(cls, codegen: Any, name: str, kept: Any) -> KernelLibrary:
        """Return the library from what was kept, with the machine code that it calls."""
        self = cls(codegen, name)
        self.inner, self.counts, code, symbols, self._bitcode, self.calls = kept
        self.inlined = code is None
        for called, machine_code in self.calls.items():
            if not all(map(codegen._engine.is_symbol_defined, called)):
                cls(codegen, name)._load(machine_code, called)
        if self.inlined:
            self._final_module, self._finalized = llvm.parse_bitcode(self._bitcode), True
        else:
            self._load(code, symbols)
        return self


_TYPES: dict[Any, Any] = {}
_CALL_TYPE: Any = BaseFunction.get_call_type


def _call_type(function: Any, context: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """`BaseFunction.get_call_type`, cached: Numba tries all templates of `+` again at each use."""
    key = (function, arguments, tuple(named.items()), repr(ConfigStack.top_or_none()._values))
    if key not in _TYPES:
        _TYPES[key] = _CALL_TYPE(function, context, arguments, named)
    return _TYPES[key]


_REPRS: dict[int, tuple[Any, str]] = {}
_REPR: Any = Record.__repr__


def _repr(record: Any) -> str:
    """`Record.__repr__`, cached: Numba writes out all fields in each pass, and when it finds no code at first."""
    if id(record) not in _REPRS:
        _REPRS[id(record)] = record, _REPR(record)
    return _REPRS[id(record)][1]


_LOADED: dict[int, Any] = {}
_LOAD: Any = CPUContext.load_additional_registries


def _load_once(context: Any) -> None:
    """`CPUContext.load_additional_registries`, once: Numba does it for each kernel, and when it finds no code."""
    if id(context) not in _LOADED:
        _LOAD(context)
        _LOADED[id(context)] = context


_CALL_TEMPLATE: Any = Dispatcher.get_call_template


def _call_template(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """`Dispatcher.get_call_template` with one type for all integers: for each other one Numba would compile again."""
    return _CALL_TEMPLATE(kernel, tuple(map(_wide, arguments)), {name: _wide(each) for name, each in named.items()})


def _wide(kind: Any) -> Any:
    kind = unliteral(kind)
    return int64 if kind in signed_domain else kind


FASTER: tuple[tuple[Any, str, Any], ...] = (
    (BaseFunction, "get_call_type", _call_type),
    (Record, "__repr__", _repr),
    (Dispatcher, "get_call_template", _call_template),
    (CPUContext, "load_additional_registries", _load_once),
    (event, "broadcast", lambda _event: None),  # times of each call of LLVM, for listeners
)
"""Replacements of parts of Numba while a kernel is compiled."""


class KernelCompiler(Compiler):
    """Numba's compiler, with these libraries."""

    def _compile_core(self) -> Any:
        before = [getattr(owner, name) for owner, name, _ in FASTER]
        for owner, name, faster in FASTER:
            setattr(owner, name, faster)
        try:
            return super()._compile_core()
        finally:
            for (owner, name, _), numbas in zip(FASTER, before, strict=True):
                setattr(owner, name, numbas)

    def define_pipelines(self) -> list[Any]:
        """The passes; symbols are named by stamps, thus the same in every process."""
        state = self.state
        state.func_id.unique_id = int(stamp(state.func_id.func)[:15], 16)
        state.library = KernelLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.counts, state.library.inner = state.flags.nrt, state.flags.no_cpython_wrapper
        state.library.inlined = state.library.inner and state.flags.forceinline
        (passes,) = super().define_pipelines()
        passes.passes = [found for found in passes.passes if found[0].__name__ not in SKIPPED]
        passes.finalize()
        return [passes]


def kernel_compiler() -> type[Compiler]:
    """Return the compiler of this file, or Numba's own if its libraries lack the methods that are extended here."""
    known = hasattr(JITCodeLibrary, "_object_compiled_hook") and hasattr(CPUCodegen, "_pass_builder")
    return KernelCompiler if known else Compiler


def _unserialize(codegen: Any, kept: tuple[str, str, Any]) -> Any:
    if kept[1] == KEPT:
        return KernelLibrary.of_kept(codegen, kept[0], kept[2])
    return _NUMBAS(codegen, kept)


_NUMBAS: Any = JITCodeLibrary._unserialize
JITCodeLibrary._unserialize = staticmethod(_unserialize)  # type: ignore[method-assign]
