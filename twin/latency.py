"""The step law: how long one engine step takes. Two forms behind one vector of coefficients.

"linear": a sum of non-negative terms, in ms (symbols: B decodes, P prefill tokens, T = B + P, A distinct
adapters in the batch, R sum of their ranks, S slots, M their rank, K context tokens of the decodes, W waiting
requests passed over, V all waiting requests, G the largest batch with a CUDA graph):

    base + per_decode·B + per_prefill_token·P + prefill_step·[P>0]
    + [A>0]·(first_adapter + per_slot·S + per_slot_rank·M + per_lora_token·T + per_slot_token·S·T
             + per_slot_rank_token·M·T)
    + per_adapter·A + per_rank·R + per_adapter_token·A·T + per_adapter_prefill_token·A·P
    + per_kv_token·K + [T>G]·(beyond_graph_step + per_token_beyond_graph·(T − G))
    + per_waiting_scanned·W + per_waiting·V

"paper": arXiv 2602.24044, equation (1), with R_P pending requests and A_all adapters served:

    k1·B + k2·R_P + k3·R_P·A/A_all + (k4·B + k5)·(k6·A + k7)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packer.profile import LINEAR_TERMS, PAPER_TERMS, LatencySpec

N_COEFFICIENTS = max(len(LINEAR_TERMS), len(PAPER_TERMS))


def coefficient_vector(latency: LatencySpec) -> npt.NDArray[np.float64]:
    """Coefficients in the kernel's order, float64 (N_COEFFICIENTS,); absent ones are 0."""
    terms = LINEAR_TERMS if latency.form == "linear" else PAPER_TERMS
    vector = np.zeros(N_COEFFICIENTS)
    for i, term in enumerate(terms):
        vector[i] = latency.coefficients.get(term, 0.0)
    return vector


def linear_features(
    *,
    decodes: npt.ArrayLike,
    prefill_tokens: npt.ArrayLike,
    adapters: npt.ArrayLike,
    sum_ranks: npt.ArrayLike,
    slots: npt.ArrayLike,
    slot_rank: npt.ArrayLike,
    kv_tokens: npt.ArrayLike,
    waiting_scanned: npt.ArrayLike,
    waiting: npt.ArrayLike,
    graph_max_tokens: int,
) -> npt.NDArray[np.float64]:
    """What each linear term multiplies, float64 (n, len(LINEAR_TERMS)); for regressions on measurements."""
    b, p, a, r, s, m, k, w, v = (
        np.atleast_1d(np.asarray(x, dtype=np.float64))
        for x in (
            decodes,
            prefill_tokens,
            adapters,
            sum_ranks,
            slots,
            slot_rank,
            kv_tokens,
            waiting_scanned,
            waiting,
        )
    )
    t = b + p
    some = (a > 0).astype(np.float64)
    beyond = (t > graph_max_tokens).astype(np.float64)
    columns = (
        np.ones_like(t),
        b,
        p,
        (p > 0).astype(np.float64),
        some,
        a,
        r,
        some * s,
        some * m,
        some * t,
        a * t,
        a * p,
        some * s * t,
        k,
        beyond,
        beyond * (t - graph_max_tokens),
        w,
        some * m * t,
        v,
    )
    return np.column_stack(np.broadcast_arrays(*columns))
