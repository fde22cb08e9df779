"""Temporal sharing, as in FineInfer: whole training steps, only while the server has no requests.

"Resource Multiplexing in Tuning and Serving Large Language Models", USENIX ATC 2025, section 2.3.2: an arrival waits
until the training step ends. The first request after an idle time is deferred, so that prefills form a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from packer import checks
from packer.twin.tuning.state import TEMPORAL


@dataclass(frozen=True)
class Temporal:
    """Parameters of temporal sharing; `defer_ms`: the deferral bound."""

    defer_ms: float = 0.0

    name: ClassVar[str] = "temporal"
    rule: ClassVar[int] = TEMPORAL
    searched: ClassVar[tuple[str, tuple[float, ...]]] = (
        "defer_ms", (0.0, 25.0, 50.0, 100.0, 150.0, 200.0, 250.0, 300.0, 400.0, 800.0),
    )  # fmt: skip
    own_base_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.real("defer_ms", self.defer_ms, low=0.0, high=1e6)

    def parameters(self) -> dict[str, float]:
        """Return the fields that the kernel reads."""
        return {"defer_s": self.defer_ms * 1e-3}
