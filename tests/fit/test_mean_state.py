"""The fit on the twin's own mean states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.fit.mean_state import (
    LARGEST_GAIN,
    SLOWER,
    family_weights,
    fit_mean_state,
    gain_of,
    gain_weights,
    simulated_equations,
    wanted_step_ms,
)
from packer.fit.runs import simulate_run
from packer.fit.step_law import Equations
from packer.fit.tables import MeasuredRun
from packer.profile import LatencySpec, Profile
from packer.terms import LINEAR_TERMS
from packer.twin.law.law import coefficient_vector

NO_MICRO = Equations(np.zeros((0, len(LINEAR_TERMS))), np.zeros(0), np.zeros(0))


def test_mean_state_reproduces_the_mean_step(true_profile: Profile, measured_runs: list[MeasuredRun]) -> None:
    """The law applied to the summed state, plus loading, is the summed step time."""
    law = coefficient_vector(true_profile.latency)
    warm = replace(true_profile, loading=replace(true_profile.loading, cold_start=False, host_base_ms=0.0))
    sim = simulate_run(measured_runs[0], warm, mean_state=True)
    means = sim.raw.means
    assert means[:-2] @ law / means[-1] == pytest.approx(means[-2] / means[-1])


def test_fit_finds_the_law_that_made_the_runs(true_profile: Profile, measured_runs: list[MeasuredRun]) -> None:
    """From a start that is wrong in every term the fit comes back to the law behind the runs."""
    true = true_profile.latency.coefficients
    wrong = LatencySpec("linear", {term: 1.6 * value for term, value in true.items()}, 512)
    fitted = fit_mean_state(replace(true_profile, latency=wrong), measured_runs, NO_MICRO, tuple(true), seed=1000)
    found = fitted.latency.coefficients
    assert found["base_ms"] == pytest.approx(true["base_ms"], rel=0.15)
    assert found["per_adapter_ms"] == pytest.approx(true["per_adapter_ms"], rel=0.15)


def test_equations_need_runs_with_a_measured_tpot(true_profile: Profile, measured_runs: list[MeasuredRun]) -> None:
    """A run without TPOT gives no equation, no error and no weight to another run."""
    other, fast = measured_runs[1], replace(measured_runs[1], rates=measured_runs[1].rates * 50)
    blank = replace(measured_runs[0], metrics={"total_tok_s": 1.0})
    equations, kept = simulated_equations(true_profile, [blank, other, fast])
    assert kept == [other, fast]
    assert np.isfinite(equations.weights).all()
    assert equations.weights[1] < equations.weights[0]


def test_starved_runs_read_the_step_off_the_throughput_too(
    true_profile: Profile, measured_runs: list[MeasuredRun]
) -> None:
    """A starved run whose simulated throughput is too high needs longer steps."""
    run = measured_runs[0]
    sim = simulate_run(run, true_profile)
    slow = replace(run, metrics={**run.metrics, "total_tok_s": 0.5 * sim.total_token_throughput,
                                 "tpot_mean_ms": sim.mean_tpot_ms})  # fmt: skip
    assert slow.starved
    assert wanted_step_ms(slow, sim, 10.0, np.nan) == pytest.approx(10.0 * 2**0.5)


def test_each_run_s_own_gain_leads_from_its_tpot_to_its_step(
    true_profile: Profile, measured_runs: list[MeasuredRun]
) -> None:
    """Of a server whose steps are longer, the TPOT gives these steps back, far from the limit as near it."""
    law = true_profile.latency.coefficients
    server, slower = (
        true_profile.with_coefficients(**{term: factor * value for term, value in law.items()})
        for factor in (1.06, SLOWER)
    )
    near = max((run for run in measured_runs if not run.starved), key=lambda run: run.rates.sum())
    gains = []
    for share in (0.02, 1.0):
        run = replace(near, rates=near.rates * share, duration_s=near.duration_s / share**0.5)
        longer = simulate_run(run, server)
        run = replace(run, metrics={**run.metrics, "total_tok_s": longer.total_token_throughput,
                                    "tpot_mean_ms": longer.mean_tpot_ms})  # fmt: skip
        sim = simulate_run(run, true_profile)
        gains.append(gain_of(sim, simulate_run(run, slower)))
        assert wanted_step_ms(run, sim, 10.0, gains[-1]) == pytest.approx(10.6, rel=0.01)
    assert 1.0 <= gains[0] < 1.1 < 1.3 < gains[1] <= LARGEST_GAIN


def test_equations_weigh_by_gain() -> None:
    """Runs of a larger gain weigh more, by the square root; starved ones as the median."""
    weights = gain_weights(np.array([1.0, 2.0, 4.0, np.nan]))
    assert weights == pytest.approx([0.5**0.5, 1.0, 2**0.5, 1.0])
    assert gain_weights(np.array([np.nan])).tolist() == [1.0]
    assert gain_weights(np.zeros(0)).size == 0


def test_runs_of_a_client_that_lags_weigh_half(measured_runs: list[MeasuredRun]) -> None:
    """Beyond 100 req/s offered, a run counts half as much as another of its family."""
    run = measured_runs[0]
    fast = replace(run, rates=run.rates * (200.0 / run.rates.sum()))
    weights = family_weights([run, run, fast])
    assert weights[2] == pytest.approx(0.5 * weights[0])
    assert weights.mean() == pytest.approx(1.0)


@pytest.mark.filterwarnings("error")
def test_no_runs_have_no_weights() -> None:
    """Where no run simulates there is nothing to weigh, and no mean of nothing is taken."""
    assert family_weights([]).size == 0
