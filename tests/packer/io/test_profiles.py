"""Profile files."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.engine_spec import EngineSpec
from packer.errors import FileFormatError, OutputError, UnknownNameError
from packer.io.profiles import (
    format_profile,
    load_profile,
    parse_profile,
    profile_from_dict,
    profile_names,
    profile_to_dict,
    write_profile,
)
from packer.profile import GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.terms import LINEAR_TERMS, PAPER_TERMS

numbers = st.floats(0.0, 1e9)
positive = st.floats(1.0, 1e12)
counts = st.integers(1, 10**6)
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any profile, with every field that the dataclasses have."""
    seqs = draw(counts)
    form = draw(st.sampled_from(["linear", "paper"]))
    terms = LINEAR_TERMS if form == "linear" else PAPER_TERMS
    point = st.tuples(st.integers(0, 512), st.integers(0, 512), st.integers(0, 10**7))
    return Profile(
        draw(text),
        draw(st.builds(ModelSpec, text, numbers, positive, numbers)),
        draw(st.builds(GpuSpec, text, positive, st.none() | numbers)),
        draw(
            st.builds(
                EngineSpec,
                text,
                text,
                counts,
                st.integers(seqs, 10**7),
                st.just(seqs),
                counts,
                st.floats(0.01, 1.0),
                st.none() | counts,
                text,
                counts,
            )
        ),
        draw(
            st.builds(
                MemorySpec,
                st.floats(-1e12, 1e12),
                numbers,
                numbers,
                counts,
                st.sampled_from(["reserved", "unified"]),
                st.lists(point, max_size=5).map(tuple),
            )
        ),
        LatencySpec(form, draw(st.dictionaries(st.sampled_from(terms), numbers)), draw(counts)),
        draw(st.builds(LoadingSpec, numbers, numbers, numbers, numbers)),
        draw(st.booleans()),
        draw(st.dictionaries(text, text, max_size=3)),
        draw(st.dictionaries(text, numbers, max_size=3)),
    )


@settings(max_examples=60, deadline=None)
@given(profile=profiles())
def test_round_trip_is_exact(profile: Profile) -> None:
    """Whatever a profile holds, its file gives the very same profile back, also through plain dicts."""
    again = parse_profile(format_profile(profile))
    assert again == profile
    assert again.fingerprint == profile.fingerprint
    assert profile_from_dict(profile_to_dict(profile)) == profile


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_are_sound(name: str) -> None:
    """Each shipped profile loads, is called after its file, is calibrated and says by whom."""
    profile = load_profile(name)
    assert profile.name == name
    assert profile.calibrated
    assert profile.provenance
    assert load_profile(name) is profile


def test_there_are_shipped_profiles() -> None:
    """The two models measured on the H100 come with the package."""
    assert {"h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct"} <= set(profile_names())


def test_unknown_names_get_the_nearest() -> None:
    """A misspelt profile is answered with the known ones; a path outside is no name."""
    with pytest.raises(UnknownNameError, match=r"Did you mean 'h100-64gb/llama-3\.1-8b-instruct'"):
        load_profile("h100-64gb/llama-3.1-8b-instuct")
    with pytest.raises(UnknownNameError):
        load_profile("../h100-64gb/llama-3.1-8b-instruct")


def test_files_are_written_once(toy_profile: Profile, tmp_path: Path) -> None:
    """A written profile loads from its path; an existing file is kept without force."""
    path = tmp_path / "toy.toml"
    write_profile(toy_profile, path)
    assert load_profile(path) == toy_profile
    assert "Estimated from datasheets, not calibrated" in path.read_text()
    with pytest.raises(OutputError):
        write_profile(replace(toy_profile, name="other"), path)
    assert load_profile(path) == toy_profile


CHANGES = [
    ("max_num_seqs = 512", "max_num_seqs = 2.5", r"key 'engine\.max_num_seqs': .*integer, got 2\.5"),
    ("max_num_seqs = 512", 'max_num_seqs = "512"', r"key 'engine\.max_num_seqs': .*got '512'"),
    ("max_num_seqs = 512", "max_num_seqs = 0", r"engine\.max_num_seqs .*got 0"),
    ("max_num_seqs = 512", "max_num_seq = 512", r"'engine\.max_num_seq': unknown key; did you mean 'max_num_seqs'"),
    ("max_num_seqs = 512", "", r"key 'engine\.max_num_seqs': this key is missing"),
    ("base_ms = 8.0", "bass_ms = 8.0", "'bass_ms'"),
    ("base_ms = 8.0", "base_ms = nan", r"latency\.coefficients\.base_ms .*got nan"),
    ("base_ms = 8.0", "base_ms = -1", r"latency\.coefficients\.base_ms .*got -1"),
    ("base_ms = 8.0", "base_ms = true", r"'latency\.coefficients\.base_ms': .*got True"),
    ("measured = []", "measured = [[8, 8]]", r"memory\.measured"),
    ('policy = "reserved"', 'policy = "other"', r"memory\.policy"),
    ("[gpu]", "[gpus]", "'gpus': unknown key; did you mean 'gpu'"),
    ("schema = 1", "schema = 2", "key 'schema': expected 1, got 2"),
    ("schema = 1", "schema = ", "expected TOML"),
    ("schema = 1", f"schema = {'[' * 3000}", "expected TOML"),
]


@pytest.mark.parametrize(("old", "new", "message"), CHANGES)
def test_bad_values_name_the_key(toy_profile: Profile, old: str, new: str, message: str) -> None:
    """Every refused file says which key and what it holds."""
    good = format_profile(toy_profile)
    assert old in good
    with pytest.raises(FileFormatError, match=message):
        parse_profile(good.replace(old, new))


def test_the_file_is_plain_toml(toy_profile: Profile) -> None:
    """Any TOML reader sees the tables that the documentation names."""
    data = tomllib.loads(format_profile(toy_profile))
    assert set(data) == {
        "schema", "name", "calibrated", "model", "gpu", "engine", "memory", "latency", "loading", "frontend",
        "measured_adapters", "startup_s",
    }  # fmt: skip
