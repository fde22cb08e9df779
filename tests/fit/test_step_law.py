"""Micro-benchmarks leave terms open: the fit takes these from a profile of another model, and only these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from packer.fit.estimate import estimate_profile
from packer.fit.pipeline import TERMS, micro_profile
from packer.fit.step_law import Equations, Prior, prior_of, residuals, solve
from packer.fit.tables import Profiling
from packer.io.profiles import load_profile
from packer.io.tables import Row
from packer.profile import GpuSpec, Profile
from packer.twin.law.linear import linear_features

LLAMA, QWEN = "h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct"


SEEN = ((50, 0), (200, 0), (400, 0), (200, 1), (200, 50), (200, 100), (200, 150))
OTHER = ((50, 5), (50, 30), (120, 20), (120, 32), (300, 32))
"""Batches and distinct adapters in them."""


def _states(batches: tuple[tuple[int, int], ...], slots: float, rank: float) -> np.ndarray:
    """The mean states of steps with these batches."""
    batch, adapters = np.array(batches, dtype=np.float64).T
    return linear_features(
        decodes=batch, prefill_tokens=batch / 40, adapters=adapters, sum_ranks=adapters * rank,
        slots=np.where(adapters > 0, slots, 0.0), slot_rank=np.where(adapters > 0, rank, 0.0),
        kv_tokens=100 * batch, waiting=0.0, graph_max_tokens=512,
    )  # fmt: skip


def _without_law(profile: Profile) -> Profile:
    return replace(profile, latency=replace(profile.latency, coefficients={}))


def _law(profile: Profile) -> np.ndarray:
    from packer.twin.law.law import coefficient_vector

    return coefficient_vector(profile.latency)


def test_other_slots_than_measured_are_predicted() -> None:
    """Measured with 300 slots of rank 8 only, the law holds for other slots and ranks; without a prior it does not."""
    true = _law(load_profile(LLAMA))
    measured = _states(SEEN, 300, 8)
    seen = Equations(measured, measured @ true, np.ones(len(SEEN)))
    prior = prior_of(_without_law(load_profile(LLAMA)))
    assert prior is not None
    assert prior.source == f"{QWEN}, scaled"
    renamed = _without_law(load_profile(LLAMA))
    model = replace(renamed.model, name="Meta-Llama/Llama-3.1-8B-Instruct")
    assert prior_of(replace(renamed, model=model)) == prior, "a model is the same under each of its names"
    laws = [solve(seen, TERMS, each) for each in (prior, None)]
    assert np.abs(residuals(seen, laws[0])).mean() < 0.04
    errors = []
    for slots, rank in ((32, 16), (16, 32), (96, 32), (64, 64), (384, 8)):
        unseen = _states(OTHER, slots, rank)
        other = Equations(unseen, unseen @ true, np.ones(len(OTHER)))
        errors.append([np.abs(residuals(other, law)).mean() for law in laws])
    with_prior, without = np.array(errors).T
    assert (with_prior < 0.08).all()
    assert (with_prior < 0.7 * without).all()
    assert without.max() > 0.15


def test_measurements_win_where_they_say_something() -> None:
    """Terms that exact equations determine do not follow a wrong prior; those that they leave open are the prior's."""
    true = {"base_ms": 10.0, "per_decode_ms": 0.05}
    features = _states(SEEN, 300, 8)[:3]
    vector = np.zeros(features.shape[1])
    vector[:2] = 10.0, 0.05
    seen = Equations(np.tile(features, (40, 1)), np.tile(features @ vector, 40), np.ones(120))
    wrong = Prior({"base_ms": 15.0, "per_decode_ms": 0.03, "per_waiting_ms": 0.0003}, "wrong")
    found = solve(seen, ("base_ms", "per_decode_ms", "per_waiting_ms", "per_slot_ms"), wrong)
    assert found["base_ms"] == pytest.approx(true["base_ms"], rel=1e-3)
    assert found["per_decode_ms"] == pytest.approx(true["per_decode_ms"], rel=1e-3)
    assert found["per_waiting_ms"] == pytest.approx(0.0003)
    assert found["per_slot_ms"] == pytest.approx(0.0, abs=1e-9)


def test_unknown_hardware_has_no_prior() -> None:
    """A GPU without a data sheet is not compared with an H100."""
    known = _without_law(load_profile(QWEN))
    assert prior_of(replace(known, gpu=GpuSpec("CPU", 1e9))) is None


def test_the_profile_says_where_open_terms_come_from() -> None:
    """A fit to micro-benchmarks alone names the profile behind its prior."""
    found = micro_profile(_without_law(load_profile(LLAMA)), Profiling(backbone=_decodes(_linear(12.0, 0.02))))
    assert found.provenance["prior"].startswith(QWEN)
    assert found.latency.coefficients["per_slot_ms"] > 0


def _linear(base_ms: float, per_decode_ms: float) -> dict[int, float]:
    """Step times by batch."""
    return {batch: base_ms + per_decode_ms * batch for batch in (50, 100, 200, 400)}


def _decodes(times_ms: Mapping[int, float]) -> tuple[Row, ...]:
    """Rows of decodes of the base model with these step times by batch."""
    return tuple(
        Row(0, {
            "phase": "decode", "set_batch_size": str(batch), "set_output_length": "100", "actual_prompt_len": "5",
            "itl_mean_ms": str(ms),
        })
        for batch, ms in times_ms.items()
    )  # fmt: skip


def test_a_mixture_of_experts_keeps_its_experts() -> None:
    """A fit to decodes of a server 1.2 times as slow as its estimate gives the time of other batches back, where the
    experts that a step reads grow with it."""
    estimate = estimate_profile("Qwen/Qwen3-30B-A3B", "h100-80gb", max_model_len=8192)
    law = estimate.latency

    def times_ms(batches: tuple[int, ...], coefficients: np.ndarray) -> np.ndarray:
        batch = np.array(batches, dtype=np.float64)
        states = linear_features(
            decodes=batch, prefill_tokens=batch * 5 / 100, kv_tokens=55 * batch, attended=batch * 12.5 / 100,
            graph_max_tokens=law.graph_max_tokens, ridge_tokens=law.ridge_tokens, expert_share=law.expert_share,
        )  # fmt: skip
        return states @ coefficients

    true = 1.2 * _law(estimate)
    seen = (1, 4, 8, 64)
    found = micro_profile(estimate, Profiling(backbone=_decodes(dict(zip(seen, times_ms(seen, true), strict=True)))))
    assert found.latency.expert_share == law.expert_share
    unseen = (2, 16, 32, 200)
    assert times_ms(unseen, _law(found)) == pytest.approx(times_ms(unseen, true), rel=0.05)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B-Instruct"])
def test_long_prompts_take_full_steps(model: str) -> None:
    """A prompt beyond the token budget is computed in full steps, each of which reads the experts and computes beyond
    the ridge: a fit to prefills of a server 1.2 times as slow as its estimate gives their time and that of shorter
    prompts back."""
    estimate = estimate_profile(model, "h100-80gb", max_model_len=32768)
    estimate = replace(estimate, engine=replace(estimate.engine, max_num_batched_tokens=2048))

    def times_ms(prompts: np.ndarray, tokens: np.ndarray, coefficients: np.ndarray, batch: float = 0.0) -> np.ndarray:
        """Time of steps with so many tokens of prompts of this length."""
        law, decodes = estimate.latency, np.full(len(prompts), batch)
        states = linear_features(
            decodes=decodes, prefill_tokens=tokens, kv_tokens=55 * decodes, attended=tokens * prompts / 2,
            ridge_tokens=law.ridge_tokens, graph_max_tokens=law.graph_max_tokens, expert_share=law.expert_share,
        )  # fmt: skip
        return states @ coefficients

    seen, unseen = np.array([256.0, 1024.0, 4096.0, 16384.0]), np.array([128.0, 512.0, 2048.0])
    true = 1.2 * _law(estimate)
    step_s = times_ms(seen, np.full(4, 2048.0), true) / 1e3
    rows = tuple(
        Row(
            0,
            {"phase": "prefill", "actual_prompt_len": str(n), "completed": "64", "duration_s": str(64 * n / 2048 * s)},
        )
        for n, s in zip(seen, step_s, strict=True)
    )
    decodes = {batch: float(times_ms(np.array([5.0]), np.zeros(1), true, batch)[0]) for batch in (1, 8, 64)}
    found = micro_profile(estimate, Profiling(backbone=(*rows, *_decodes(decodes))))
    assert times_ms(seen, np.full(4, 2048.0), _law(found)) == pytest.approx(1e3 * step_s, rel=0.01)
    assert times_ms(unseen, unseen, _law(found)) == pytest.approx(times_ms(unseen, unseen, true), rel=0.05)


def test_what_was_not_measured_stays_as_in_the_base() -> None:
    """Decodes of the base model change no term of adapters, and make no calibrated profile of an estimate."""
    base = load_profile(LLAMA)
    measured = Profiling(backbone=_decodes(_linear(20.0, 0.03)))
    found = micro_profile(base, measured)
    assert found.latency.coefficients["base_ms"] > 1.5 * base.latency.coefficients["base_ms"]
    for term in ("first_adapter_ms", "per_adapter_ms", "per_slot_rank_ms", "per_lora_token_ms"):
        assert found.latency.coefficients[term] == pytest.approx(base.latency.coefficients[term], rel=1e-5)
    assert found.provenance["prior"] == f"{LLAMA}, for what measurements leave open"
    assert found.calibrated
    assert not micro_profile(replace(base, calibrated=False), measured).calibrated


def test_measured_loads_keep_how_the_engine_evicts() -> None:
    """A table of loading times says nothing of cold starts, or of whether loads spare the batch, as SGLang's do."""
    sglang = estimate_profile("meta-llama/Llama-3.1-8B-Instruct", "h100-80gb", engine_name="sglang")
    row = Row(0, {"adapter_rank": "8", "gpu_load_mean_ms": "5", "disk_load_mean_ms": "50"})
    found = micro_profile(sglang, Profiling(loading=(row,))).loading
    assert (found.host_base_ms, found.disk_base_ms) == (5.0, 50.0)
    assert (found.cold_start, found.spares_batch) == (sglang.loading.cold_start, True)
