"""Speculative decoding is read from a text and a profile's file, costs memory, and is started as it was simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.errors import FileFormatError, ValidationError
from packer.io.profiles import format_profile, load_profile, parse_profile
from packer.io.workloads import read_workload, write_workload
from packer.profile import Profile
from packer.settings import Settings
from packer.speculation import SpeculationSpec
from packer.traces.read import read_trace
from packer.twin.memory.policy import kv_cache_tokens
from packer.twin.override import with_engine
from packer.twin.simulate import simulate
from packer.workload import Workload

TEXT = "eagle3:num_speculative_tokens=3,acceptance=0.6,draft_pass_ms=0.8"


def _with(**changes: object) -> Profile:
    base = load_profile("h100-64gb/llama-3.1-8b-instruct")
    return with_engine(base, vllm_version="0.32.0", speculation=SpeculationSpec.parse(TEXT), **changes)


def test_a_text_gives_the_same_settings_back() -> None:
    """What `str` writes, `parse` reads; vLLM's flag holds what vLLM knows of them."""
    spec = SpeculationSpec.parse(f"{TEXT},model=acme/toy-eagle")
    assert spec == SpeculationSpec("eagle3", 3, 0.6, draft_pass_ms=0.8, model="acme/toy-eagle")
    assert SpeculationSpec.parse(str(spec)) == spec
    flag = replace(_with().engine, speculation=spec).arguments["speculative-config"]
    assert isinstance(flag, str)
    assert json.loads(flag) == {"method": "eagle3", "model": "acme/toy-eagle", "num_speculative_tokens": 3}


def test_vllm_is_not_started_without_a_drafter() -> None:
    """vLLM ends with "num_speculative_tokens was provided but without speculative model", but for mtp."""
    assert SpeculationSpec("mtp", 1, 0.6).config == {"method": "mtp", "num_speculative_tokens": 1}
    for method in ("draft_model", "eagle", "eagle3"):
        spec = SpeculationSpec(method, 1, 0.6)
        with pytest.raises(ValidationError, match=rf"a setting model .* does not start {method} .* got '{method}:num"):
            _ = spec.config


@pytest.mark.parametrize(
    "text",
    ["eagle3", "eagle3:num_speculative_tokens=3", "eagle3:num_speculative_tokens=x,acceptance=0.5",
     "medusa:num_speculative_tokens=3,acceptance=0.5", "eagle3:num_speculative_tokens=3,acceptance=0.5,match_rate=0.5",
     "ngram:num_speculative_tokens=3,acceptance=0.5", "eagle3:num_speculative_tokens=0,acceptance=0.5",
     "eagle3:num_speculative_tokens=3,acceptance=1.5", "eagle3:num_speculative_tokens=3,acceptance=0.5,speed=2",
     "eagle3:num_speculative_tokens=3,acceptance=0.5,acceptance=0.6"],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    """A method that is not simulated, a setting of another or of none, a value out of range: errors that show it."""
    with pytest.raises(ValidationError):
        SpeculationSpec.parse(text)


def test_a_step_pays_for_its_drafts() -> None:
    """A drafter takes a pass for each draft."""
    spec, times = SpeculationSpec.parse(TEXT), []
    one = RequestTrace(np.zeros(1), np.zeros(1, int), np.array([30]), np.array([50]))
    fleet = Workload([Adapter("a", 8, 1.0, acceptance=0.0)], arrivals=Arrivals("trace", trace=one))
    for pass_ms in (0.0, 0.8):
        engine = replace(_with().engine, async_scheduling=False, speculation=replace(spec, draft_pass_ms=pass_ms))
        run = simulate(fleet, replace(_with(), engine=engine), max_loras=1, duration_s=30)
        times.append(run.engine_mean_tpot_ms)
    assert times[1] - times[0] == pytest.approx(0.8 * 3, rel=1e-6)


def test_profiles_keep_it() -> None:
    """The file of a profile holds it, and the fingerprint counts it."""
    profile = _with(scheduling_policy="priority")
    again = parse_profile(format_profile(profile))
    assert again.engine == profile.engine
    assert again.fingerprint == profile.fingerprint
    assert profile.fingerprint != _with().fingerprint


def test_a_drafter_takes_memory_from_the_kv_cache() -> None:
    """Its weights, and its own KV for each token."""
    profile, settings = _with(), Settings(8, 16)
    bare = kv_cache_tokens(profile, settings)
    spec = profile.engine.speculation
    assert spec is not None
    own = profile.model.kv_bytes_per_token
    for drafter, expected in (
        ({"draft_bytes": 1e9}, bare - 1e9 / own),
        ({"draft_kv_bytes_per_token": own}, bare / 2),
    ):
        engine = replace(profile.engine, speculation=replace(spec, **drafter))
        assert kv_cache_tokens(replace(profile, engine=engine), settings) == pytest.approx(expected, abs=1)


def test_drafts_fit_into_a_step() -> None:
    """vLLM never admits a request whose drafts the budget of a step does not hold."""
    base = load_profile("h100-64gb/llama-3.1-8b-instruct").engine
    with pytest.raises(ValidationError, match="num_speculative_tokens"):
        replace(base, max_num_batched_tokens=8, max_num_seqs=8, speculation=SpeculationSpec("mtp", 7, 0.5))


def test_priorities_and_acceptance_round_trip(tmp_path: Path) -> None:
    """Every format holds them; a trace has a priority for each request, and a wrong one is named."""
    fleet = Workload([Adapter("a", 8, 1.0, priority=-2, acceptance=0.25), Adapter("b", 16, 0.5)], name="fleet")
    for ending in ("csv", "parquet", "json", "yaml"):
        path = tmp_path / f"fleet.{ending}"
        write_workload(fleet, path)
        assert read_workload(path) == fleet
    path = tmp_path / "trace.csv"
    text = "timestamp,adapter,rank,input_tokens,output_tokens,priority\n0,a,8,10,5,3\n1,a,8,10,5,\n"
    path.write_text(text)
    read = read_workload(path)
    assert read.arrivals.trace is not None
    assert read.arrivals.trace.priority is not None
    assert read.arrivals.trace.priority.tolist() == [3, 0]
    write_workload(read, tmp_path / "trace.json")
    again = read_workload(tmp_path / "trace.json").arrivals.trace
    assert again is not None
    assert again.priority is not None
    assert again.priority.tolist() == [3, 0]
    path.write_text(text.replace(",3\n", ",high\n"))
    with pytest.raises(FileFormatError, match=r"row 2.*priority"):
        read_trace(path)
