"""Numba's flags for all kernels of the project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packer.twin import kernel_library
from packer.twin.kernel_cache import install
from packer.twin.kernel_folder import cache_folder

FLAGS: dict[str, Any] = {
    "cache": cache_folder() is not None, "nogil": True, "boundscheck": False, "no_cfunc_wrapper": True,
    "pipeline_class": kernel_library.kernel_compiler(),
}  # fmt: skip

ENGINE_FLAGS: dict[str, Any] = FLAGS | {"_nrt": False}
"""For kernels that create no arrays: without reference counting, which took ten times as long as a step."""

CALLED: dict[str, Any] = ENGINE_FLAGS | {"no_cpython_wrapper": True, "forceinline": False}
"""For kernels that only kernels call; see `packer.twin.kernel_library`."""

INLINED: dict[str, Any] = CALLED | {"forceinline": True}
"""For such kernels that are called in each step, or are short: a call passes the parts of all arrays."""

ENTERED: dict[str, Any] = ENGINE_FLAGS | {"forceinline": True}  # For kernels that each step and Python call.

# Kernels made by another version of `kernel_library` are recompiled.
install(FLAGS, ENGINE_FLAGS, CALLED, INLINED, ENTERED, {"libraries": Path(kernel_library.__file__).read_bytes()})
