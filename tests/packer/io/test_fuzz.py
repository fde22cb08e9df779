"""Whatever bytes a file holds, reading it ends in a result or in one of our errors."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packer.errors import InputError
from packer.fit.model_config import read_model_config
from packer.io.plans import load_plan
from packer.io.profiles import format_profile, load_profile
from packer.io.workloads import read_workload
from packer.profile import Profile
from packer.traces.read import read_trace

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SLOW_FUZZ = settings(FUZZ, max_examples=4)  # every Parquet file costs a process


def parquet(**columns: Any) -> bytes:
    data = io.BytesIO()
    pl.DataFrame(columns).write_parquet(data)
    return data.getvalue()


CSV = b'# c\nadapter,rank,rate,input_tokens\n"a,b",8,0.1,12\nb,16,2e-3,\n'
JSON = json.dumps(
    {
        "adapters": [{"name": "a", "rank": 8, "rate": 0.1, "input_tokens": {"kind": "empirical", "values": [1, 2]}}],
        "arrivals": {"kind": "piecewise", "factors": [1, 2]},
    }
).encode()
YAML = b"adapters:\n- {name: a, rank: 8, rate: 1e-3}\nlength_correlation: -0.5\n"
TRACE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48,10\n2023-11-16 18:17:04,31,8\n"
JSONL = b"""{"timestamp": 0, "input_length": 6955, "output_length": 52}
{"timestamp": 9, "input_length": 1, "output_length": 2}
"""
CONFIG = (Path(__file__).parents[2] / "data" / "models" / "qwen-2.5-7b.json").read_bytes()

SEEDS: list[tuple[str, bytes, Callable[[Path], object]]] = [
    ("f.csv", CSV, read_workload),
    ("f.csv.gz", gzip.compress(CSV, mtime=0), read_workload),
    ("f.json", JSON, read_workload),
    ("f.yaml", YAML, read_workload),
    ("t.csv", TRACE, read_trace),
    ("t.jsonl", JSONL, read_trace),
    ("config.json", CONFIG, read_model_config),
    ("plan.json", b'{"schema": 1, "status": "feasible", "n_gpus": 1, "bins": []}', load_plan),
]
NAMES = [f"{name}-{reader.__name__}" for name, _, reader in SEEDS]

BITS = b', \n " { [ null nan 1e999 -1 true \xff \x00 # \xed\xa0\x80 &a *a !!python/object:x 0x10 1:30 2023-02-30'
pieces = st.binary(max_size=8) | st.sampled_from([b"", b"9" * 400, b"[" * 2000, *BITS.split(b" ")])
edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6), pieces), min_size=1, max_size=4)


def mutated(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    """The bytes with pieces cut out and others put in at some places."""
    for where, cut, piece in changes:
        at = int(where * len(data))
        data = data[:at] + piece + data[at + cut :]
    return data


def message_of(reader: Callable[[Path], object], path: Path) -> str:
    """The message of the only kind of error that may come, or nothing."""
    try:
        reader(path)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "seed", "reader"), SEEDS, ids=NAMES)
@FUZZ
@given(changes=edits)
def test_damaged_files(
    name: str, seed: bytes, reader: Callable[[Path], object], tmp_path: Path, changes: list[Any]
) -> None:
    """A good file with damage here and there is read or refused, never a crash."""
    path = tmp_path / name
    path.write_bytes(mutated(seed, changes))
    assert len(message_of(reader, path)) < 3000


@pytest.mark.parametrize("reader", [read_workload, read_trace])
@SLOW_FUZZ
@given(changes=edits)
def test_damaged_parquet(reader: Callable[[Path], object], tmp_path: Path, changes: list[Any]) -> None:
    """The same for Parquet between its magic bytes, where damage reaches the decoder."""
    columns = {"timestamp": [0.0], "adapter": ["a"], "rank": [8], "input_tokens": [3], "output_tokens": [4]}
    if reader is read_workload:
        columns = {"adapter": ["a"], "rank": [8], "rate": [0.5]}
    path = tmp_path / "f.parquet"
    path.write_bytes(b"PAR1" + mutated(parquet(**columns)[4:-4], changes) + b"PAR1")
    assert len(message_of(reader, path)) < 3000


@FUZZ
@given(changes=edits)
def test_damaged_profiles(tmp_path: Path, toy_profile: Profile, changes: list[Any]) -> None:
    """The same for profile files."""
    path = tmp_path / "p.toml"
    path.write_bytes(mutated(format_profile(toy_profile).encode(), changes))
    message = message_of(load_profile, path)
    assert not message or message.startswith(str(path))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["adapters", "name", "rank", "rate", "input_tokens", "kind", "mean", "cv", "values", "x"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@FUZZ
@given(data=json_values, ending=st.sampled_from(["json", "yaml"]))
def test_any_json_value(tmp_path: Path, data: Any, ending: str) -> None:
    """Any JSON value at all in place of a workload is read or refused."""
    path = tmp_path / f"f.{ending}"
    path.write_text(json.dumps(data))
    assert len(message_of(read_workload, path)) < 3000
