"""Chunked training, as in FlexLLM: samples are divided into chunks, and at most one runs with each decode step.

"Resource Multiplexing in Tuning and Serving Large Language Models", USENIX ATC 2025, section 2.3.2: a sample of N
chunks reads the weights 2 N times. A server without requests trains chunk after chunk, so an arrival waits for one
chunk at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from numba import njit

from packer.arrays import Record
from packer import checks
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.tuning.state import CHUNKED, pass_ms


@dataclass(frozen=True)
class Chunked:
    """Parameters of chunked training.

    `chunk_tokens`: tokens of a chunk.
    `slo_decode_ms`: limit of a decode step with a chunk; steps that would exceed it run without one.
    """

    chunk_tokens: int = 64
    slo_decode_ms: float = 45.0

    name: ClassVar[str] = "chunked"
    rule: ClassVar[int] = CHUNKED
    searched: ClassVar[tuple[str, tuple[float, ...]]] = ("chunk_tokens", (16, 32, 48, 64, 96, 128, 192, 256, 384, 512))
    own_base_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.integer("chunk_tokens", self.chunk_tokens, low=1, high=10**6)
        checks.real("slo_decode_ms", self.slo_decode_ms, low=0.0, high=1e6, open_low=True)

    def parameters(self) -> dict[str, float]:
        """Return the fields that the kernel reads."""
        return {"chunk": self.chunk_tokens, "slo_ms": self.slo_decode_ms}


@njit(**ENGINE_FLAGS)
def chunks_of(job: Record) -> float:
    """Return the number of chunks in a pass."""
    return float(math.ceil(job.tokens / job.chunk))


@njit(**ENGINE_FLAGS)
def chunk_ms(job: Record) -> float:
    """Return the time of the next chunk with the GPU to itself, ms; the last one of a pass has the remaining tokens."""
    tokens = job.tokens - (chunks_of(job) - 1.0) * job.chunk if job.left == 1.0 else job.chunk
    return float(pass_ms(job, tokens, job.direction))


@njit(**ENGINE_FLAGS)
def chunk_beside(job: Record, decode_ms: float) -> tuple[float, float]:
    """Return the time of a decode step with the chunk that runs with it, ms, and the number of chunks: 0 or 1."""
    ms = decode_ms + chunk_ms(job)
    return (ms, 1.0) if ms <= job.slo_ms else (decode_ms, 0.0)
