"""Training on a simulated server: the record of one server; a cluster has one for each server."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import IntArray, Record, record
from packer.twin.flags import ENGINE_FLAGS


(FORWARD, BACKWARD) = (0.0, 1.0)
(LLMSTATION, TEMPORAL, SPATIAL, CHUNKED) = range(4)  # Values of the field `rule`.

TRAINING = record(
    # The job.
    ("rule", "f8"),  # of its policy
    ("layers", "f8"),
    ("weights_ms", "f8"),  # fixed time of a forward pass
    ("token_ms", "f8"),  # time per token
    ("backward_ratio", "f8"),  # time of a backward pass / time of a forward pass
    ("batch", "f8"),  # samples in a training step
    ("samples", "f8"),  # total number to train, infinite: no end
    # Parameters of policies, see `packer.twin.tuning.policies`.
    ("slo_ms", "f8"),
    ("decode_factor", "f8"),
    ("tuning_factor", "f8"),
    ("defer_s", "f8"),
    ("share", "f8"),
    ("chunk", "f8"),
    # Progress.
    ("done", "f8"),  # samples done
    ("direction", "f8"),  # of the pass
    ("left", "f8"),  # units of work left in the pass
    ("tokens", "f8"),  # in this batch
    ("next", "i8"),  # the next sample
    # Totals.
    ("tokens_done", "f8"),  # in the samples done
    ("beside", "f8"),  # engine steps during which training ran
    ("ended", "f8"),  # 1 after the idle end of the run
)


class Tuning(NamedTuple):
    """One job on one server: a record of `TRAINING`, and lengths of samples, int64 (k,), used in turn."""

    job: Record
    lengths: IntArray


def no_tuning(servers: int) -> Tuning:
    """Servers that train nothing."""
    return Tuning(np.zeros(servers, dtype=TRAINING), np.ones(1, dtype=np.int64))


@njit(inline="always", **ENGINE_FLAGS)
def has_work(job: Record) -> bool:
    """Whether samples are left."""
    return bool(job.done < job.samples)


@njit(inline="always", **ENGINE_FLAGS)
def pass_ms(job: Record, tokens: float, direction: float) -> float:
    """Return the time of a pass over `tokens` with the GPU to itself, ms."""
    forward: float = job.weights_ms + tokens * job.token_ms
    return forward if direction == FORWARD else forward * job.backward_ratio
