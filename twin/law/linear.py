"""The linear step law, in ms: the sum over `packer.terms` of a non-negative coefficient times the term's quantity."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.arrays import FloatArray
from packer.terms import LINEAR_TERMS
from packer.twin.flags import FLAGS
from packer.twin.law.law import EXPERT_SHARE, GRAPH_MAX, ONE_GRAPH, RIDGE

N_TERMS = len(LINEAR_TERMS)
SPLIT_K_SMALL, SPLIT_K_LARGE = 64.0, 8.0
LAST_SMALL_STEP = 120  # tokens; the next captured graph has 128
BLOCK_M, BLOCK_N = 32, 16
AT: Any = namedtuple("AT", LINEAR_TERMS)(*range(N_TERMS))  # Index of each term in the vectors, by its name.


@njit(inline="always", **FLAGS)
def state_vector(
    out: FloatArray, b: float, p: float, a: float, ranks: float, slots: float, slot_rank: float,
    context: float, waiting: float, settings: FloatArray, request_ranks: float,
    padded_ranks: float, registered: float, attended: float,
) -> None:  # fmt: skip
    """Write to `out`, float64 (N_TERMS,), the quantity that each term multiplies; symbols: see `packer.terms`.

    `settings`: `Law.settings`. `attended`: J.
    """
    t = b + p
    graph_max, ridge, share = settings[GRAPH_MAX], settings[RIDGE], settings[EXPERT_SHARE]
    # If all CUDA graphs include LoRA kernels, a server with slots replays these in steps without adapters, too.
    replayed = settings[ONE_GRAPH] > 0 and slots > 0 and t <= graph_max
    lora = 1.0 if a > 0 or replayed else 0.0
    beyond = t - graph_max if t > graph_max else 0.0
    out[AT.base_ms] = 1.0
    out[AT.per_decode_ms] = b
    out[AT.per_prefill_token_ms] = p
    out[AT.prefill_step_ms] = 1.0 if p > 0 else 0.0
    out[AT.first_adapter_ms] = lora
    out[AT.per_adapter_ms] = a
    out[AT.per_rank_ms] = ranks
    out[AT.per_slot_ms] = lora * slots
    out[AT.per_slot_rank_ms] = lora * slot_rank
    out[AT.per_lora_token_ms] = lora * t
    out[AT.per_adapter_token_ms] = a * t
    out[AT.per_slot_token_ms] = lora * slots * t
    out[AT.per_kv_token_ms] = context
    out[AT.beyond_graph_step_ms] = 1.0 if beyond > 0 else 0.0
    out[AT.per_token_beyond_graph_ms] = beyond
    out[AT.per_slot_rank_token_ms] = lora * slot_rank * t
    out[AT.per_waiting_ms] = waiting
    # Thread blocks of vLLM's shrink kernel: SPLIT_K * ceil(T / BLOCK_M) * ceil(rank / BLOCK_N) for each slot.
    blocks = SPLIT_K_SMALL if t <= LAST_SMALL_STEP else SPLIT_K_LARGE
    blocks *= math.ceil(slot_rank / BLOCK_N)
    out[AT.per_slot_block_ms] = lora * slots * blocks * math.ceil(t / BLOCK_M)
    out[AT.per_adapter_block_ms] = a * blocks
    out[AT.per_request_rank_ms] = request_ranks
    out[AT.per_padded_rank_ms] = padded_ranks
    out[AT.per_adapter_registered_ms] = a * registered
    out[AT.per_token_beyond_ridge_ms] = t - ridge if 0.0 < ridge < t else 0.0
    out[AT.per_attended_token_ms] = attended
    out[AT.experts_ms] = 1.0 - (1.0 - share) ** t if share > 0.0 else 0.0


@njit(inline="always", **FLAGS)
def linear_ms(c: FloatArray, vector: FloatArray) -> float:
    """The step's time: the sum over all terms of coefficient × state, in the order of the table."""
    ms = 0.0
    for i in range(N_TERMS):
        ms += c[i] * vector[i]
    return ms


@njit(**FLAGS)
def _fill(out: FloatArray, states: FloatArray, settings: FloatArray) -> None:
    for i in range(out.shape[0]):
        s = states[i]
        state_vector(out[i], s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], settings, s[8], s[9], s[10], s[11])


STATE = (
    "decodes", "prefill_tokens", "adapters", "sum_ranks", "slots", "slot_rank", "kv_tokens", "waiting",
    "sum_request_ranks", "padded_ranks", "registered", "attended",
)  # fmt: skip
"""Names of the columns of a state, in the order in which `_fill` reads them."""


def linear_features(
    *, graph_max_tokens: int, ridge_tokens: float = 0.0, expert_share: float = 0.0, **state: npt.ArrayLike
) -> FloatArray:
    """Return `state_vector` of many states, float64 (n, N_TERMS), for regressions on measurements. `state`: columns by
    the names in `STATE`; missing columns are 0. Raises `TypeError`: a column has another name."""
    if unknown := state.keys() - set(STATE):
        raise TypeError(f"linear_features() got unexpected columns: {', '.join(sorted(unknown))}")
    columns = [np.atleast_1d(np.asarray(state.get(name, 0.0), dtype=np.float64)) for name in STATE]
    states = np.column_stack(np.broadcast_arrays(*columns))
    out = np.empty((len(states), N_TERMS))
    _fill(out, states, np.array([0.0, graph_max_tokens, ridge_tokens, expert_share, 0.0]))
    return out
