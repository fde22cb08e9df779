"""packer: how many GPUs a fleet of LoRA adapters needs, and which adapter goes where.

    >>> import packer
    >>> profile = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    >>> fleet = packer.Workload([packer.Adapter(f"a{i}", rank=8, rate=0.1) for i in range(64)])
    >>> plan = packer.solve(fleet, profile, objective="gpus")

Names are loaded at first use (PEP 562), so that `packer --help` starts fast.
"""

from __future__ import annotations

import _signal
import sys

if sys.argv[:1] and sys.argv[0].endswith("packer") and _signal.getsignal(2) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # Ctrl-C while the command imports is no traceback

import re
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_HOME = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
"""Module of each public name, as type checkers read it, too."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'packer' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
