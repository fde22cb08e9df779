"""From traces to workloads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packer.errors import ValidationError
from packer.traces.assign import Ranks, assign_adapters, popularity
from packer.traces.measure import measure_workload, rounded
from packer.traces.read import read_trace
from packer.traces.trace import Trace


def made_up(n: int = 6000, *, adapters: int = 3, correlation: float = 0.0, seed: int = 0) -> Trace:
    """Gamma lengths (cv 0.5, another mean for each adapter) with correlated scores."""
    from packer.lengths import Lengths

    rng = np.random.default_rng(seed)
    adapter = rng.permutation(np.arange(n) % adapters)
    x, y = rng.standard_normal((2, n))
    scores = x, correlation * x + np.sqrt(1 - correlation**2) * y
    lengths = [
        np.array(
            [Lengths.gamma(m, 0.5).at_normal(np.array([z]))[0] for z, m in zip(s, 400.0 * (adapter + 1), strict=True)]
        )
        for s in scores
    ]
    names = tuple(f"a{k}" for k in range(adapters))
    return Trace(np.sort(rng.uniform(0, 100, n)), *lengths, adapter, names, (8,) * adapters)


def test_the_offered_load_is_the_traces() -> None:
    """Rates and means are measured so that their product is exactly what was seen."""
    trace = made_up()
    tokens = (trace.input_tokens + trace.output_tokens).sum()
    fleet = measure_workload(trace)
    assert fleet.offered_tok_s == pytest.approx(tokens / trace.span_s)
    assert fleet.rate == pytest.approx(len(trace) / trace.span_s)
    assert rounded(fleet).offered_tok_s == pytest.approx(tokens / trace.span_s, rel=1e-5)


@pytest.mark.parametrize("correlation", [-0.6, 0.0, 0.5])
def test_correlation_and_spread_within_adapters(correlation: float) -> None:
    """The correlation and cv are those within adapters: different means between them don't count."""
    fleet = measure_workload(made_up(correlation=correlation))
    assert fleet.length_correlation == pytest.approx(correlation, abs=0.05)
    for k, adapter in enumerate(fleet.adapters):
        assert adapter.input_tokens is not None
        assert adapter.input_tokens.mean == pytest.approx(400.0 * (k + 1), rel=0.05)
        assert adapter.input_tokens.cv == pytest.approx(0.5, abs=0.03)


def test_few_requests_take_the_fleets_spread() -> None:
    """An adapter with a handful of requests can't show its own spread: it gets the pooled one."""
    fleet = measure_workload(made_up(300, adapters=100))
    spreads = {adapter.input_tokens.cv for adapter in fleet.adapters if adapter.input_tokens}
    assert len(spreads) == 1
    assert spreads.pop() == pytest.approx(0.5, abs=0.1)


def test_one_request_each_still_has_a_spread() -> None:
    """Where no adapter has two requests, the spread is that over all of them; equal lengths are constant."""
    n = 5
    times, ones = np.arange(n, dtype=np.float64), np.ones(n, dtype=np.int64)
    trace = Trace(times, ones * 7, np.arange(1, n + 1), np.arange(n), tuple("abcde"), (8,) * n)
    fleet = measure_workload(trace)
    assert {a.input_tokens.kind for a in fleet.adapters if a.input_tokens} == {"constant"}
    assert fleet.adapters[0].output_tokens is not None
    assert fleet.adapters[0].output_tokens.cv == pytest.approx(np.std(np.arange(1, n + 1)) / 3.0, abs=1e-4)


def test_replay_keeps_the_requests() -> None:
    """A replayed workload holds the requests themselves."""
    trace = made_up(50)
    kept = measure_workload(trace, replay=True).arrivals.trace
    assert kept is not None
    assert np.array_equal(kept.input_tokens, trace.input_tokens)


def test_what_cannot_be_measured_is_refused() -> None:
    """A trace without adapters, or of a single instant, gives no rates."""
    one = np.array([1], dtype=np.int64)
    bare = Trace(np.array([0.0]), one, one)
    with pytest.raises(ValidationError, match="adapters and ranks"):
        measure_workload(bare)
    with pytest.raises(ValidationError, match=r"longer than 0 s.* 1 request .* in trace"):
        measure_workload(assign_adapters(bare, 1, ranks=(8,)))


def test_assignment_follows_the_power_law_and_the_seed() -> None:
    """Popularity is k^-exponent, ranks come from the set, and the seed decides everything."""
    trace = made_up(20_000)
    given = assign_adapters(trace, 20, ranks=(8, 32), exponent=1.0, seed=4)
    assert given.adapter is not None
    assert given.ranks is not None
    shares = np.bincount(given.adapter) / len(trace)
    assert shares == pytest.approx(popularity(20, 1.0), abs=0.01)
    assert set(given.ranks) == {8, 32}
    again = assign_adapters(trace, 20, ranks=(8, 32), exponent=1.0, seed=4)
    assert np.array_equal(given.adapter, again.adapter)
    assert given.ranks == again.ranks
    assert assign_adapters(trace, 20, ranks=(8, 32), seed=5).ranks != given.ranks
    unnamed, zero = (assign_adapters(trace, 20, **seed).adapter for seed in ({}, {"seed": 0}))
    assert np.array_equal(unnamed, zero)  # type: ignore[arg-type]


def test_adapters_without_requests_are_left_out() -> None:
    """More adapters than requests: those that got none are not in the fleet."""
    given = assign_adapters(made_up(10), 1000, ranks=(8, 16), seed=0)
    assert given.adapter is not None
    assert len(given.names) == len(set(given.adapter.tolist())) <= 10
    assert len(given.ranks or ()) == len(given.names)


def test_ranks_come_from_the_table_and_else_from_the_set() -> None:
    """The table decides where it names an adapter; the others are drawn; without a set that is an error."""
    assert Ranks({"b": 8}, (64,)).of(("a", "b", "c")) == (64, 8, 64)
    assert Ranks({"a": 8}).of(("a",)) == (8,)
    for others in ((), (0,), (7.5,)):
        with pytest.raises(ValidationError):
            Ranks(others=others).of(("a",))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["conv", "code"])
def test_the_committed_example_comes_from_the_trace(root: Path, tmp_path: Path, name: str) -> None:
    """The example workload is byte for byte what the command in its header makes of the Azure trace."""
    from packer.cli import run

    source = root.parent / "shared" / "data" / "traces" / f"azure_llm_2023_{name}.csv.gz"
    if not source.exists():
        pytest.skip("the Azure trace is not here")
    committed = root / "examples" / "workloads" / f"azure-{name}-2023.csv"
    *notes, command = [line[2:] for line in committed.read_text().splitlines() if line.startswith("#")]
    words = command.split()[1:]
    words[2] = str(source)
    words[-1] = str(tmp_path / words[-1])
    assert run([*words, "--quiet"]) == 0
    made = "".join(f"# {note}\n" for note in notes) + Path(words[-1]).read_text()
    assert made == committed.read_text()
    assert read_trace(source).dropped == 0
