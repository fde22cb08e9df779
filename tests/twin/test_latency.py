"""The step law: its vector of coefficients, its regression features and its compiled form say the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.profile import LINEAR_TERMS, PAPER_TERMS, LatencySpec
from packer.twin.kernel_law import PER_WAITING, gap_bin, linear_ms, paper_ms
from packer.twin.kernel_state import HISTOGRAM_BINS, HISTOGRAM_FLOOR_MS, HISTOGRAM_PER_E
from packer.twin.latency import N_COEFFICIENTS, coefficient_vector, linear_features

COUNT = st.integers(0, 3000)


@given(COUNT, COUNT, st.integers(0, 300), COUNT, COUNT, COUNT, COUNT, COUNT, COUNT)
@settings(deadline=None)
def test_features_are_what_the_kernel_multiplies(
    b: int, p: int, a: int, ranks: int, slots: int, rank: int, kv: int, scanned: int, waiting: int
) -> None:
    """Features times coefficients is the step time that the kernel computes."""
    coefficients = np.random.default_rng(b + p).random(N_COEFFICIENTS)
    features = linear_features(
        decodes=b, prefill_tokens=p, adapters=a, sum_ranks=ranks, slots=slots, slot_rank=rank, kv_tokens=kv,
        waiting_scanned=scanned, waiting=waiting, graph_max_tokens=512,
    )  # fmt: skip
    ms = linear_ms(coefficients, b, p, a, ranks, slots, rank, kv, scanned, 512.0)
    ms += coefficients[PER_WAITING] * waiting
    assert features.shape == (1, len(LINEAR_TERMS))
    assert ms == pytest.approx(float(features[0] @ coefficients[: len(LINEAR_TERMS)]), rel=1e-12)


def test_terms_stand_where_their_names_say() -> None:
    """Each coefficient goes to the place of its term, absent ones are 0."""
    for form, terms in (("linear", LINEAR_TERMS), ("paper", PAPER_TERMS)):
        for i, term in enumerate(terms):
            vector = coefficient_vector(LatencySpec(form, {term: 2.0}))  # type: ignore[arg-type]
            assert vector.shape == (N_COEFFICIENTS,)
            assert vector[i] == vector.sum() == 2.0


def test_terms_mean_what_they_say() -> None:
    """A step of 3 decodes and 600 prompt tokens, by hand, one term after another."""
    state = {
        "base_ms": 1, "per_decode_ms": 3, "per_prefill_token_ms": 600, "prefill_step_ms": 1,
        "first_adapter_ms": 1, "per_adapter_ms": 2, "per_rank_ms": 24, "per_slot_ms": 8,
        "per_slot_rank_ms": 16, "per_lora_token_ms": 603, "per_adapter_token_ms": 1206,
        "per_adapter_prefill_token_ms": 1200, "per_slot_token_ms": 8 * 603,
        "per_kv_token_ms": 900, "beyond_graph_step_ms": 1, "per_token_beyond_graph_ms": 91,
        "per_waiting_scanned_ms": 5, "per_slot_rank_token_ms": 16 * 603,
    }  # fmt: skip
    for term, times in state.items():
        c = coefficient_vector(LatencySpec("linear", {term: 1.0}))
        assert linear_ms(c, 3, 600, 2, 24, 8, 16, 900, 5, 512.0) == times, term
    assert set(LINEAR_TERMS) - set(state) == {"per_waiting_ms"}


def test_no_adapter_costs_nothing_of_lora() -> None:
    """A batch without adapters pays for none of the terms of LoRA."""
    lora = {t: 1.0 for t in LINEAR_TERMS if "adapter" in t or "slot" in t or "lora" in t or "rank" in t}
    c = coefficient_vector(LatencySpec("linear", lora))
    assert linear_ms(c, 3, 600, 0, 0, 8, 16, 900, 5, 512.0) == 0.0


def test_papers_law_by_hand() -> None:
    """Equation (1) of arXiv 2602.24044 with whole numbers."""
    c = coefficient_vector(LatencySpec("paper", {f"k{i}": float(i) for i in range(1, 8)}))
    # k1·B + k2·R_P + k3·R_P·A/A_all + (k4·B + k5)(k6·A + k7), B=2, R_P=10, A=4, A_all=8
    assert paper_ms(c, 2, 10, 4, 8) == 2 + 20 + 15 + (8 + 5) * (24 + 7)


@given(st.floats(1e-9, 1e6))
@settings(deadline=None)
def test_gaps_fall_into_the_bin_around_them(gap_s: float) -> None:
    """A gap's bin holds it within its resolution of 0.7 %, beyond the ends the last bin takes it."""
    k = gap_bin(gap_s)
    assert 0 <= k < HISTOGRAM_BINS
    low_ms = HISTOGRAM_FLOOR_MS * np.exp(k / HISTOGRAM_PER_E)
    if 0 < k < HISTOGRAM_BINS - 1:
        assert low_ms * (1 - 1e-9) <= gap_s * 1e3 <= low_ms * np.exp(1 / HISTOGRAM_PER_E) * (1 + 1e-9)
