"""Profiles with other engine settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from packer.errors import ValidationError
from packer.fit.estimate import estimate_profile
from packer.fit.models import model_named
from packer.io.profiles import load_profile
from packer.profile import Profile
from packer.twin.engine_rules import rules_of
from packer.twin.memory.policy import kv_cache_tokens
from packer.twin.override import variants, with_engine

LLAMA = load_profile("h100-64gb/llama-3.1-8b-instruct")


def tokens(profile: Profile) -> int:
    return kv_cache_tokens(profile, profile.settings(32, 16))


def test_the_profile_stays_where_nothing_changes() -> None:
    """Settings that are those of the profile give the profile itself, with its fingerprint."""
    assert with_engine(LLAMA) is LLAMA
    assert with_engine(LLAMA, max_num_seqs=2048, gpu_memory_utilization=0.9) is LLAMA


def test_memory_follows_the_gpu_memory_utilization() -> None:
    """A twentieth of the GPU's memory less is that many KV tokens less, at measured points too."""
    less = with_engine(LLAMA, gpu_memory_utilization=0.85)
    lost = 0.05 * LLAMA.gpu.memory_bytes / LLAMA.model.kv_bytes_per_token
    assert tokens(LLAMA) - tokens(less) == pytest.approx(lost, abs=2)
    assert less.engine.gpu_memory_utilization == 0.85
    assert less.fingerprint != LLAMA.fingerprint
    assert "gpu_memory_utilization 0.85" in less.name


def test_an_estimate_with_the_settings_is_the_other_way() -> None:
    """Changing an estimate gives what estimating with the setting gives, or less memory where logits grow."""
    model = model_named("meta-llama/Llama-3.1-8B-Instruct")
    plain = estimate_profile(model, "h100-80gb")
    for settings in ({"gpu_memory_utilization": 0.8}, {"max_model_len": 8192}):
        assert tokens(with_engine(plain, **settings)) == pytest.approx(
            tokens(estimate_profile(model, "h100-80gb", **settings)), abs=1
        )
    more = tokens(estimate_profile(model, "h100-80gb", max_num_seqs=2048))
    assert 0.85 * more < tokens(with_engine(plain, max_num_seqs=2048)) < more < tokens(plain)
    assert tokens(with_engine(plain, max_num_seqs=64)) == tokens(plain)


def test_a_shorter_context_needs_less_kv_cache_to_start() -> None:
    """vLLM starts with room for one request of max_model_len."""
    assert LLAMA.memory.min_kv_tokens == 131_072
    assert with_engine(LLAMA, max_model_len=8192).memory.min_kv_tokens == 8192
    assert with_engine(LLAMA, max_model_len=8200).memory.min_kv_tokens == 8208, "in blocks of 16 tokens"


def test_every_combination_is_a_kind_of_server() -> None:
    """Lists of settings give each combination once, the profile's own settings included where they are named."""
    found = variants(LLAMA, max_num_seqs=(256, 2048), gpu_memory_utilization=(0.9, 0.95, 0.9))
    assert len(found) == 4
    assert LLAMA in found
    assert len({each.name for each in found}) == 4
    assert variants(LLAMA) == [LLAMA]


def test_another_version_of_vllm_changes_the_rules_alone() -> None:
    """Memory and step law stay; what the version does not do is shown with the profile, and costs nothing."""
    later = with_engine(LLAMA, vllm_version="0.11.0")
    assert later.engine.release == (0, 11)
    assert (later.memory, later.latency, later.frontend) == (LLAMA.memory, LLAMA.latency, LLAMA.frontend)
    assert "version 0.11.0" in later.name
    shown = dict(later.facts())["first use of an adapter"]
    assert shown == dict(LLAMA.facts())["first use of an adapter"] + ", not in this version of vLLM"
    assert variants(LLAMA, vllm_version=["0.11.0"]) == [later]
    assert variants(LLAMA, vllm_version="0.11.0") == [later]


def test_a_queue_has_a_limit_from_the_version_that_knows_it() -> None:
    """`--max-num-queued-reqs` came with vLLM 0.29; the flag starts what was simulated."""
    later = with_engine(LLAMA, vllm_version="0.29.0", max_num_queued_reqs=64)
    assert later.engine.arguments == {"max-num-queued-reqs": 64}
    rules_of(later.engine)
    with pytest.raises(ValidationError, match=r"0\.29"):
        rules_of(with_engine(LLAMA, max_num_queued_reqs=64).engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 0},
        {"max_num_queued_reqs": 0},
        {"max_num_seqs": 4096},
        {"gpu_memory_utilization": 1.5},
        {"vllm_version": "newest"},
        {"vllm_version": ""},
        {"async_scheduling": True},
        {"vllm_version": "0.9.2", "async_scheduling": True},
    ],
)
def test_settings_that_no_server_takes_are_refused(settings: dict[str, Any]) -> None:
    """The rules of a profile hold for changed settings too."""
    with pytest.raises(ValidationError):
        with_engine(LLAMA, **settings)


def test_windows_need_a_version_that_drops_tokens() -> None:
    """Before 0.9.1, all layers keep all tokens: an estimate of that version has other memory."""
    gemma = estimate_profile("google/gemma-3-27b-it", "h200", version="0.9.2")
    assert gemma.model.kv_shape == with_engine(gemma, vllm_version="0.32.0").model.kv_shape is not None
    with pytest.raises(ValidationError, match=r"from 0\.9\.1 on.*got 0\.8\.5: packer profiles estimate"):
        with_engine(gemma, vllm_version="0.8.5")


def test_a_version_of_vllm_is_for_servers_of_vllm() -> None:
    """Another engine has no rules by vLLM's numbers."""
    other = replace(LLAMA, engine=replace(LLAMA.engine, name="lightllm"))
    with pytest.raises(ValidationError, match="lightllm"):
        with_engine(other, vllm_version="0.11.0")


def test_provenance_names_the_version_that_was_measured() -> None:
    """Where several settings change, the version before stands behind the version."""
    changed = with_engine(LLAMA, vllm_version="0.32.0", max_num_seqs=128, prefix_caching=False)
    text = changed.provenance["settings"]
    assert text.endswith("max_num_seqs 128, version 0.32.0 instead of 0.8.5, prefix_caching off")
