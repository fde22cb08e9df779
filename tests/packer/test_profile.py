"""Profiles."""

from __future__ import annotations

from dataclasses import asdict, field, make_dataclass, replace

import numpy as np
import pytest

from packer.engine_spec import EngineSpec
from packer.errors import ValidationError
from packer.io.profiles import load_profile, profile_names
from packer.profile import GpuSpec, LatencySpec, MemorySpec, ModelSpec, Profile


def test_what_the_twin_sees_decides_the_fingerprint(toy_profile: Profile) -> None:
    """A new coefficient changes the fingerprint; a new price or a note does not."""
    assert toy_profile.with_coefficients(base_ms=9.0).fingerprint != toy_profile.fingerprint
    noted = replace(toy_profile, provenance={"who": "us"}, gpu=replace(toy_profile.gpu, price_per_hour=3.0))
    noted = replace(noted, model=replace(noted.model, repository="acme/toy"))
    assert noted.fingerprint == toy_profile.fingerprint
    assert noted != toy_profile
    assert hash(noted) == hash(toy_profile)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100-64gb/llama-3.1-8b-instruct", "623e6e44549e0706"),
        ("h100-64gb/qwen-2.5-7b-instruct", "0e29cbe0a8153130"),
    ],
)
def test_fingerprints_of_the_shipped_profiles_are_pinned(name: str, expected: str) -> None:
    """Models, data sets and results carry these: a change of code alone must not change them."""
    assert load_profile(name).fingerprint == expected


def test_shipped_profiles_name_their_repositories() -> None:
    """A start command needs the full name of a Hugging Face repository."""
    for name in profile_names():
        assert "/" in (load_profile(name).model.repository or "")


def test_a_new_field_with_a_default_keeps_the_fingerprint(toy_profile: Profile) -> None:
    """A later version adds fields to a part of the profile: at its default a field is not hashed."""
    later = make_dataclass("Later", [("answer_ms", float, field(default=0.0))], bases=(EngineSpec,), frozen=True)
    engine = later(**asdict(toy_profile.engine))
    assert replace(toy_profile, engine=engine).fingerprint == toy_profile.fingerprint
    changed = later(**asdict(toy_profile.engine), answer_ms=5.0)
    assert replace(toy_profile, engine=changed).fingerprint != toy_profile.fingerprint


def test_a_coefficient_of_zero_is_no_coefficient(toy_profile: Profile) -> None:
    """A term of the step law that is absent and one that is 0 are the same law."""
    assert "per_waiting_ms" not in toy_profile.latency.coefficients
    assert toy_profile.with_coefficients(per_waiting_ms=0.0).fingerprint == toy_profile.fingerprint


def test_number_types_and_order_do_not_matter(toy_profile: Profile) -> None:
    """Ints, NumPy scalars and the order of coefficients give the same fingerprint as plain floats."""
    memory = replace(toy_profile.memory, kv_budget_bytes=np.float64(32e9), slot_bytes=1_000_000)
    terms = dict(reversed(toy_profile.latency.coefficients.items()))
    twin = replace(toy_profile, memory=memory, latency=replace(toy_profile.latency, coefficients=terms))
    assert twin == toy_profile


def test_an_estimate_says_so(toy_profile: Profile) -> None:
    """The label for people marks an uncalibrated profile; that of a calibrated one is its name."""
    assert toy_profile.label == "toy (estimated, not calibrated)"
    assert replace(toy_profile, calibrated=True).label == "toy"


@pytest.mark.parametrize(("version", "old"), [("0.7.3", True), ("v0.6", True), ("0.8.0", False), ("0", False)])
def test_an_engine_older_than_v1_is_marked(toy_profile: Profile, version: str, old: bool) -> None:
    """Steps of vLLM before 0.8 are simulated as V1's: the label says so, for vLLM alone."""
    profile = replace(toy_profile, calibrated=True, engine=replace(toy_profile.engine, version=version))
    assert ("simulated with the schedule of V1" in profile.label) == old
    other = replace(profile, engine=replace(profile.engine, name="other"))
    assert other.label == "toy"


@pytest.mark.parametrize(
    ("key", "build"),
    [
        ("engine.max_num_seqs", lambda: EngineSpec("vllm", "1", 2048, 2048, 0)),
        ("engine.max_num_batched_tokens", lambda: EngineSpec("vllm", "1", 2048, 100, 256)),
        ("engine.gpu_memory_utilization", lambda: EngineSpec("vllm", "1", 1, 1, 1, gpu_memory_utilization=1.5)),
        ("engine.max_num_batched_tokens", lambda: EngineSpec("vllm", "1", 1, 10**30, 1)),
        ("model.kv_bytes_per_token", lambda: ModelSpec("m", 1e9, 1e-300, 1e6)),
        ("gpu.memory_bytes", lambda: GpuSpec("g", 1e300)),
        ("memory.min_kv_tokens", lambda: MemorySpec(1e9, 0, 0, 0)),
        ("memory.policy", lambda: MemorySpec(1e9, 0, 0, 1, policy="x")),  # type: ignore[arg-type]
        ("memory.measured", lambda: MemorySpec(1e9, 0, 0, 1, measured=((8, 8, -1),))),
        ("latency.form", lambda: LatencySpec("cubic", {})),  # type: ignore[arg-type]
        ("latency.coefficients.base_ms", lambda: LatencySpec("linear", {"base_ms": -1.0})),
        ("'k1'", lambda: LatencySpec("linear", {"k1": 1.0})),
    ],
)
def test_bad_values_name_their_key(key: str, build: object) -> None:
    """A refused value names the key as it stands in the file."""
    with pytest.raises(ValidationError, match=key.replace(".", r"\.")):
        build()  # type: ignore[operator]


@pytest.mark.parametrize("word", ["", "a b", "$(x)", "x" * 65, 5])
@pytest.mark.parametrize("key", ["quantization", "kv_cache_dtype", "lora_target_modules"])
def test_words_that_reach_a_start_script_are_names(key: str, word: object) -> None:
    """They are written into commands, so nothing but vLLM's own kind of names is taken."""
    given = (word,) if key == "lora_target_modules" else word
    with pytest.raises(ValidationError, match=f"engine.{key}"):
        EngineSpec("vllm", "0.32.0", 4096, 2048, 64, **{key: given})


@pytest.mark.parametrize(("version", "rank"), [("0.8.5", 8), ("0.11.0", 8), ("0.32.0", 1)])
def test_slots_have_a_rank_that_the_version_takes(toy_profile: Profile, version: str, rank: int) -> None:
    """vLLM takes --max-lora-rank 1 since 0.11.1; before, adapters of rank 1 are in slots of rank 8."""
    profile = replace(toy_profile, engine=replace(toy_profile.engine, name="vllm", version=version))
    assert profile.settings(4, 1).max_lora_rank == rank
    assert profile.settings(4, 16).max_lora_rank == 16
