"""The linear step law: the table of its terms, the state that they multiply, and the sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.profile import LatencySpec
from packer.terms import LINEAR, LINEAR_TERMS, PAPER_TERMS
from packer.twin.law.law import coefficient_vector
from packer.twin.law.linear import linear_features

COUNT = st.integers(0, 3000)
BY_HAND = {
    "base_ms": 1, "per_decode_ms": 3, "per_prefill_token_ms": 600, "prefill_step_ms": 1,
    "first_adapter_ms": 1, "per_adapter_ms": 2, "per_rank_ms": 24, "per_slot_ms": 8,
    "per_slot_rank_ms": 16, "per_lora_token_ms": 603, "per_adapter_token_ms": 1206,
    "per_slot_token_ms": 8 * 603, "per_kv_token_ms": 900,
    "beyond_graph_step_ms": 1, "per_token_beyond_graph_ms": 91,
    "per_slot_rank_token_ms": 16 * 603, "per_waiting_ms": 7,
    "per_slot_block_ms": 8 * 8 * 19, "per_adapter_block_ms": 2 * 8,
    "per_request_rank_ms": 40, "per_padded_rank_ms": 4 * 16, "per_adapter_registered_ms": 2 * 30,
    "per_token_beyond_ridge_ms": 303, "per_attended_token_ms": 180_000, "experts_ms": 1 - 0.5**603,
}  # fmt: skip
"""What the terms multiply in a step of 3 decodes and 600 prompt tokens of one request, by the words of the table."""


def _state(b: int = 3, p: int = 600, a: int = 2, ranks: int = 24, waiting: int = 7) -> dict[str, float]:
    row = linear_features(
        decodes=b, prefill_tokens=p, adapters=a, sum_ranks=ranks, slots=8, slot_rank=16, kv_tokens=900,
        waiting=waiting, graph_max_tokens=512,
        sum_request_ranks=40 if a else 0, padded_ranks=4 * 16 if a else 0,
        registered=30, attended=180_000, ridge_tokens=300, expert_share=0.5,
    )  # fmt: skip
    return dict(zip(LINEAR_TERMS, row[0].tolist(), strict=True))


def test_state_is_what_the_table_says() -> None:
    """Each entry of the state has the value that its row of the table says, by hand."""
    assert _state() == BY_HAND


@pytest.mark.parametrize(("tokens", "steps"), [(0, 0.0), (1, 1.0), (2, 1.0)])
def test_a_step_with_any_prompt_token_is_a_prefill_step(tokens: int, steps: float) -> None:
    """The last token of a prompt, alone in its chunk, makes a prefill step as 2,000 do."""
    assert _state(p=tokens)["prefill_step_ms"] == steps


def test_no_adapter_costs_nothing_of_lora() -> None:
    """A batch without adapters has nothing that a term of LoRA multiplies."""
    bare = _state(a=0, ranks=0)
    assert {bare[term.name] for term in LINEAR if term.part == "lora"} == {0.0}


def test_empty_queue_costs_nothing_of_the_queue() -> None:
    """Without waiting requests nothing is left of the terms of the queue."""
    idle = _state(waiting=0)
    assert {idle[term.name] for term in LINEAR if term.part == "queue"} == {0.0}


@pytest.mark.parametrize("form", ["linear", "paper"])
def test_terms_stand_where_their_names_say(form: str) -> None:
    """Each coefficient goes to the place of its term, absent ones are 0."""
    terms = LINEAR_TERMS if form == "linear" else PAPER_TERMS
    for i, term in enumerate(terms):
        vector = coefficient_vector(LatencySpec(form, {term: 2.0}))  # type: ignore[arg-type]
        assert vector.tolist() == [2.0 if k == i else 0.0 for k in range(len(terms))]


@given(st.lists(st.tuples(COUNT, COUNT, COUNT), min_size=1, max_size=5))
@settings(deadline=None, max_examples=30)
def test_states_of_many_steps_are_those_of_each(steps: list[tuple[int, int, int]]) -> None:
    """Columns broadcast, and each row is the state of its step alone."""
    b, p, a = np.array(steps, dtype=float).T
    table = linear_features(
        decodes=b, prefill_tokens=p, adapters=a, sum_ranks=24, slots=8, slot_rank=16, kv_tokens=900,
        waiting=7, graph_max_tokens=512,
        sum_request_ranks=np.where(a > 0, 40, 0), padded_ranks=np.where(a > 0, 64, 0),
        registered=30, attended=180_000, ridge_tokens=300, expert_share=0.5,
    )  # fmt: skip
    expected = [list(_state(*step).values()) for step in steps]
    assert table.tolist() == expected
