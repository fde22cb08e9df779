"""Numba's flags, named once for all kernels of the project."""

from __future__ import annotations

from typing import Any

from packer.twin.kernel_cache import install

FLAGS: dict[str, Any] = {"cache": True, "nogil": True, "boundscheck": False, "no_cfunc_wrapper": True}

ENGINE_FLAGS: dict[str, Any] = FLAGS | {"_nrt": False}
"""For kernels that make no arrays: without counting references, which took ten times as long as a step."""

install(FLAGS, ENGINE_FLAGS)
