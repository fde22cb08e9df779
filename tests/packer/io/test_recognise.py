"""A file of the wrong kind is named, with the commands that take it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from packer.errors import FileFormatError
from packer.io.clusters import read_cluster
from packer.io.frames import pl
from packer.io.parquet import parquet_bytes
from packer.io.plans import load_plan
from packer.io.profiles import load_profile
from packer.io.recognise import hint, kind_of
from packer.io.workloads import read_workload
from packer.plan import Plan
from packer.traces.read import read_trace

LOG = '{"timestamp": 1767225600, "model": "a", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n'
TRACE = "timestamp,input_tokens,output_tokens,adapter,rank\n0,1,1,a,8\n1,1,1,a,8\n"


@pytest.fixture
def files(tmp_path: Path, root: Path, toy_plan: Callable[..., Plan]) -> dict[str, Path]:
    """One file of each kind."""
    found = {
        "plan": tmp_path / "plan.json",
        "log of requests": tmp_path / "trace.csv.gz",
        "workload": root / "examples" / "workloads" / "paper-256.csv",
        "profile": root / "twin" / "profiles" / "h100-64gb" / "llama-3.1-8b-instruct.toml",
        "data sheet": tmp_path / "card.toml",
        "cluster": root / "examples" / "clusters" / "four-h100.toml",
    }
    toy_plan(("a", "b"), gpus=1).save(found["plan"])
    found["data sheet"].write_text("# A card.\ntitle = 'X'\nbandwidth_bytes_s = 1e12\n")
    found["log of requests"].write_bytes(gzip.compress(TRACE.encode()))
    return found


def test_each_kind_is_recognised(files: dict[str, Path], tmp_path: Path) -> None:
    """The first bytes of a file say what it is; other files are nothing that is known."""
    assert {kind: kind_of(path) for kind, path in files.items()} == {kind: kind for kind in files}
    (tmp_path / "log").write_text(3 * LOG)
    assert kind_of(tmp_path / "log") == "log of requests"
    for k, text in enumerate(("", "\0\1", "a,b\n1,2\n", "{", "[" * 5000, '{"a": 1}', "[table]\nx = 1\n")):
        path = tmp_path / f"other-{k}"
        path.write_text(text)
        assert kind_of(path) is None
    assert kind_of(tmp_path / "missing") is None


@pytest.mark.parametrize("kind", ["profile", "cluster"])
def test_a_toml_file_may_begin_with_a_table(kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    """The bracket of a TOML table does not make a JSON list of a file."""
    path = tmp_path / "bare.toml"
    text = files[kind].read_text()
    path.write_text(text[text.index("\n[") + 1 :])
    assert kind_of(path) == kind


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        (
            {"timestamp": [1], "adapter": ["a"], "rank": [8], "input_tokens": [1], "output_tokens": [1]},
            "log of requests",
        ),
        ({"time": [1], "model": ["a"], "usage": [{"prompt_tokens": 1, "completion_tokens": 1}]}, "log of requests"),
        ({"adapter": ["a"], "rank": [8], "rate": [1.0]}, "workload"),
        ({"x": [1]}, None),
    ],
)
def test_parquet_is_known_by_its_columns(tmp_path: Path, columns: dict[str, list[object]], kind: str | None) -> None:
    """A table is the same kind of file in Parquet as in text: commands treat a trace alike."""
    path = tmp_path / "table.parquet"
    path.write_bytes(parquet_bytes(pl.DataFrame(columns)))
    assert kind_of(path) == kind
    path.write_bytes(path.read_bytes()[:-5])
    assert kind_of(path) is None


@pytest.mark.parametrize(
    ("read", "own"),
    [
        (load_plan, ("plan",)),
        (read_workload, ("workload", "log of requests")),
        (read_trace, ("log of requests",)),
        (load_profile, ("profile",)),
        (read_cluster, ("cluster",)),
    ],
)
def test_a_wrong_file_is_named(files: dict[str, Path], read: Callable[[Path], object], own: tuple[str, ...]) -> None:
    """What a reader refuses is said to be what it is; its own kind is no news."""
    for kind, path in files.items():
        if kind in own:
            read(path)
            continue
        with pytest.raises(FileFormatError, match=rf"This is an? {kind}: .*packer|--") as caught:
            read(path)
        assert str(caught.value).count("This is a") == 1
        assert "JSON" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "instead"),
    [
        (
            "scrape of /metrics",
            "# HELP vllm:prompt_tokens_total Prefill tokens.\n# TYPE vllm:prompt_tokens_total counter\n"
            'vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+06\n',
            "packer workload from-metrics --url",
        ),
        ("scrape of /metrics", 'vllm:num_requests_running{model_name="m"} 3.0\n', "from-metrics"),
        (
            "plain access log",
            '10.0.0.2 - al [27/Nov/2026:10:00:02 +0000] "POST /v1/completions HTTP/1.1" 200 223 "-" "curl"\n',
            "JSON lines",
        ),
        ("plain access log", "#Software: IIS\n#Fields: date time model\n2026-11-27 10:00:02 a\n", "JSON lines"),
        (
            "server's own log",
            "INFO 11-27 10:00:02 [logger.py:39] Received request cmpl-1: prompt: 'x', p\n",
            "from-metrics",
        ),
        (
            "server's own log",
            '(APIServer pid=7) INFO:     10.0.0.2:41 - "POST /v1/chat HTTP/1.1" 200\n',
            "from-metrics",
        ),
        (
            "batch file",
            '{"id": "b", "custom_id": "r1", "response": {"body": {"model": "a", "created": 5, "usage": '
            '{"prompt_tokens": 9, "completion_tokens": 3}}}, "error": null}\n',
            "no times at which they arrive",
        ),
        (
            "server's own log",
            "2026-11-27T10:00:02.5Z (APIServer pid=1) INFO 11-27 10:00:02 [logger.py:43] Received request cmpl-1\n",
            "from-metrics",
        ),
        ("spreadsheet", b"PK\3\4\x14\0\6\0\x08\0" + bytes(16) + b"\x13\0\x08\2[Content_Types].xml", "save it as CSV"),
        ("web page", b"\n<!DOCTYPE html>\n<html><body>Log in</body></html>", "Take the file itself"),
        ("spreadsheet", bytes.fromhex("d0cf11e0a1b11ae1"), "save it as CSV"),
        ("packed file", b"PK\3\4\x14\0\6\0\x08\0" + bytes(16) + b"\5\0\0\0a.csv", "unpack it"),
        ("packed file", bytes.fromhex("28b52ffd0400"), "unpack it"),
        ("packed file", bytes.fromhex("fd377a585a00"), "unpack it"),
        ("packed file", gzip.compress(b"a.csv".ljust(257, b"\0") + b"ustar\x0000", mtime=0), "unpack it"),
    ],
)
@pytest.mark.parametrize("read", [read_workload, read_trace, load_plan])
def test_a_file_that_no_command_reads_is_named(
    kind: str, text: str | bytes, instead: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    """What people have at hand and packer can't read, whatever it is called, is named with what to do instead."""
    for name in ("given.csv", "given.txt", "given.log"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert kind_of(path) == kind
        with pytest.raises(FileFormatError, match=rf"expected a [\w ]+\. This is a {kind}: ") as caught:
            read(path)
        assert instead in str(caught.value)
        assert "column" not in str(caught.value)


def test_a_list_is_a_log_or_a_fleet(tmp_path: Path) -> None:
    """A .json list of requests is a log also where a workload is expected, and one of adapters is a workload."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"time": 5, "model": "a", "prompt_tokens": 9, "completion_tokens": 3}], indent=1))
    with pytest.raises(FileFormatError, match="the requests have no ranks; make a workload of them"):
        read_workload(path)
    path.write_text(json.dumps([{"name": "x", "rank": 8, "rate": 1, "model": "a"}]))
    assert read_workload(path).adapters[0].model == "a"


def test_json_lines_are_no_damaged_plan(tmp_path: Path) -> None:
    """A log of JSON lines given for a plan is named, though its second line is what breaks the rules of JSON."""
    path = tmp_path / "access.jsonl"
    path.write_text(3 * LOG)
    with pytest.raises(FileFormatError, match=r"jsonl: expected a plan\. This is a log of requests: packer init"):
        load_plan(path)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("benchmark result", '{"request_throughput": 1.5, "total_input_tokens": 900}'),
        ("model configuration", '{\n "architectures": ["LlamaForCausalLM"],\n "hidden_size": 4096\n}'),
    ],
)
def test_other_json_is_named(kind: str, text: str, tmp_path: Path) -> None:
    """A file of JSON that an option takes is no fleet: the message names the option."""
    path = tmp_path / "given.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=rf"This is a {kind}: .*--"):
        read_workload(path)


def test_a_log_that_no_command_can_use_is_sent_to_none(tmp_path: Path) -> None:
    """A trace of one request has no rates for any command: the message says what would have."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE.rsplit("\n", 2)[0])
    with pytest.raises(FileFormatError, match=r"1 request at one time in trace\.csv: take a longer log") as caught:
        read_workload(path)
    assert "packer init" not in str(caught.value)


def test_a_damaged_file_of_the_right_kind_gets_no_hint(tmp_path: Path) -> None:
    """A workload with a wrong cell is still a workload."""
    path = tmp_path / "fleet.csv"
    path.write_text("adapter,rank,rate\na,8,-1\n")
    with pytest.raises(FileFormatError) as caught:
        read_workload(path)
    assert "This is a" not in str(caught.value)
    assert hint(path, "read_ranks") == ("", "", False)
