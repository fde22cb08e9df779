"""Blocks of requests: which of them begin alike, and what a trace with them must keep to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.blocks import COMPACT, Blocks
from packer.errors import ValidationError
from packer.io.workload_schema import workload_from_dict, workload_to_dict
from packer.workload import Workload


def blocks(*rows: list[int], tokens: int = 16) -> Blocks:
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return Blocks(starts.astype(np.int64), np.array([i for row in rows for i in row], dtype=np.int64), tokens)


def trace(inputs: list[int], outputs: list[int], held: Blocks | None) -> RequestTrace:
    n = len(inputs)
    tokens = (np.array(side, dtype=np.int64) for side in (inputs, outputs))
    return RequestTrace(np.arange(n, dtype=float), np.zeros(n, dtype=np.int64), *tokens, blocks=held)


@pytest.mark.parametrize("far", [0, 10**15])
@pytest.mark.parametrize(
    ("rows", "request_number"),
    [([[1, 2, 3], [1, 2, 4], [5, 2]], 2), ([[1, 2], [2]], 1), ([[1, 2, 1]], 0), ([[7], [7, 8], [], [8]], 3)],
)
def test_an_id_stands_for_all_before_it(far: int, rows: list[list[int]], request_number: int) -> None:
    """An id that follows two others breaks the chain; the message names a request, for small and for large ids."""
    held = [[i + far for i in row] for row in rows]
    with pytest.raises(ValidationError, match=rf"of request {request_number} behind several"):
        blocks(*held)


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12), st.sampled_from([1, 10**12]))
def test_chains_by_construction_are_accepted(contents: list[list[int]], factor: int) -> None:
    """Ids made of the content of a block and the id before it are never refused; their parts are these requests."""
    known: dict[tuple[int, int], int] = {}
    rows = []
    for content in contents:
        row: list[int] = []
        for c in content:
            row.append(known.setdefault((row[-1] if row else -1, c), factor * len(known)))
        rows.append(row)
    held = blocks(*rows)
    assert len(held) == len(rows)
    part = held.take(slice(1, None))
    assert [part.ids[part.starts[i] : part.starts[i + 1]].tolist() for i in range(len(part))] == rows[1:]
    assert COMPACT > 1


def test_blocks_are_rows_of_whole_numbers() -> None:
    """Starts rise from 0 to the number of ids, ids are >= 0, a block has a token at least."""
    ids = np.arange(3)
    for starts in ([0, 2], [1, 3], [0, 3, 2, 3], []):
        with pytest.raises(ValidationError, match="starts of blocks"):
            Blocks(np.array(starts, dtype=np.int64), ids, 16)
    with pytest.raises(ValidationError, match="in request 1"):
        blocks([1], [-2])
    with pytest.raises(ValidationError, match="tokens of a block"):
        blocks([1], tokens=0)
    with pytest.raises(ValidationError, match=r"a row of whole numbers, got 0\.5 in place 0"):
        Blocks(np.array([0, 1]), np.array([0.5]), 16)
    with pytest.raises(ValidationError, match=f"whole numbers below 2\\*\\*63, got {2**63} in place 0"):
        Blocks(np.array([0, 1]), np.array([2**63], dtype=np.uint64), 16)


def test_a_trace_has_the_blocks_of_its_prompts() -> None:
    """Each full block of a prompt has an id, at most each block of the request; the message names the request."""
    trace([32, 16], [1, 40], blocks([1, 2], [1, 3, 4]))
    with pytest.raises(ValidationError, match=r"request 1 \(33 tokens\), and at most 3 with its output, got 1"):
        trace([16, 33], [1, 1], blocks([1], [2]))
    with pytest.raises(ValidationError, match="at most 2 with its output, got 3"):
        trace([16], [16], blocks([1, 2, 3]))
    with pytest.raises(ValidationError, match="blocks of 2 requests, got blocks of 1"):
        trace([16, 16], [1, 1], blocks([1]))


def test_blocks_stay_with_their_requests() -> None:
    """A faster trace, one of fewer adapters and one read from a plan's file keep the blocks of their requests."""
    held = blocks([1, 2], [3], [1, 4])
    whole = trace([32, 16, 32], [1, 1, 1], held)
    assert whole.faster(2.0).blocks is held
    fleet = Workload(
        [Adapter("a", 8, 1.0), Adapter("b", 8, 1.0)],
        arrivals=Arrivals(
            "trace",
            trace=RequestTrace(whole.time_s, np.array([0, 1, 0]), whole.input_tokens, whole.output_tokens, blocks=held),
        ),
    )
    part = fleet.subset([0]).arrivals.trace
    assert part is not None
    assert part.blocks is not None
    assert part.blocks.ids.tolist() == [1, 2, 1, 4]
    read = workload_from_dict(workload_to_dict(fleet))
    assert read.fingerprint == fleet.fingerprint
    assert read.arrivals.trace is not None
    assert read.arrivals.trace.blocks is not None
    assert read.arrivals.trace.blocks.starts.tolist() == [0, 2, 3, 5]
