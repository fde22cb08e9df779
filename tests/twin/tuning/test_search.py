"""The search returns the most training among the values that keep the limits."""

from __future__ import annotations

import pytest

from packer.adapter import Adapter
from packer.errors import UnknownNameError
from packer.io.profiles import load_profile
from packer.twin.simulate import simulate
from packer.twin.tuning.search import candidates, most_training, tuning_rows
from packer.workload import Workload

PROFILE = load_profile("h100-64gb/llama-3.1-8b-instruct")
FLEET = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(4)])
RUN = {"max_loras": 4, "duration_s": 300.0}


@pytest.mark.parametrize("policy", ["llmstation", "chunked", "spatial", "temporal"])
def test_best_of_all_values(policy: str) -> None:
    """The result is the best of separate runs."""
    runs = [simulate(FLEET, PROFILE, tuning=spec, **RUN) for spec in candidates(policy)]
    limits = {
        f"server.{name}": sorted(getattr(sim, name) for sim in runs)[5] for name in ("p99_ttft_ms", "p99_tpot_ms")
    }
    tuned = most_training(FLEET, PROFILE, policy, slo=limits, **RUN)
    kept = [all(getattr(sim, name.removeprefix("server.")) <= limit for name, limit in limits.items()) for sim in runs]
    assert any(kept)
    assert tuned.tok_s == max(sim.tuning_tok_s for sim, ok in zip(runs, kept, strict=True) if ok)
    assert [ok for _, _, ok in tuned.tried] == kept


def test_limits_out_of_reach() -> None:
    """Without a value that keeps the limits there is no training; the run shown is the one that trains least."""
    tuned = most_training(FLEET, PROFILE, "chunked", slo={"p99_tpot_ms": 1.0}, **RUN)
    assert tuned.best is None
    assert tuned.samples_s == tuned.tok_s == 0.0
    assert tuned.simulation.tuning_tok_s == min(tok_s for _, tok_s, _ in tuned.tried)
    assert tuned.to_dict()["p99_tpot_ms"] > 1.0


def test_a_value_that_is_given_stays() -> None:
    """The searched parameter is not varied where the caller sets it."""
    assert candidates("chunked:chunk_tokens=40") == ["chunked:chunk_tokens=40"]
    assert "chunked:slo_decode_ms=30,chunk_tokens=16" in candidates("chunked:slo_decode_ms=30")


def test_unknown_limit() -> None:
    """An unknown limit is named."""
    with pytest.raises(UnknownNameError, match="speed"):
        most_training(FLEET, PROFILE, "chunked", slo={"speed": 1.0}, **RUN)


def test_rows_cover_the_grid() -> None:
    """One row for each number of slots and rate."""
    rows = tuning_rows(
        FLEET,
        PROFILE,
        ["temporal:defer_ms=0"],
        rate_factors=(0.5, 1.0),
        max_loras=(2, 4),
        slo="none",
        duration_s=60.0,
    )
    assert [(row["max_loras"], row["rate"]) for row in rows] == [(2, 2.0), (2, 4.0), (4, 2.0), (4, 4.0)]


def test_a_server_without_requests_keeps_every_limit() -> None:
    """No request waits there: it trains as much as it can."""
    silent = Workload([Adapter("a", 8, 1e-9)])
    tuned = most_training(silent, PROFILE, "temporal", slo={"p99_ttft_ms": 1.0}, **RUN)
    assert tuned.samples_s > 10.0
