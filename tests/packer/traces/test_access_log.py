from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import FileFormatError, PackerError
from packer.traces.access_log import Fields
from packer.traces.read import read_trace

LITELLM = {
    "startTime": "2026-02-01 10:00:00 UTC",
    "model": "hosted_vllm/a",
    "model_group": "a",
    "usage": {"prompt_tokens": 9, "Prompt-Tokens": 8, "completion_tokens": 3},
}
ENVOY = {
    "start_time": "2026-02-01T10:00:01.5Z",
    "gen_ai.request.model": "b",
    "gen_ai": {"usage": {"input_tokens": 7, "output_tokens": 1}},
}
NGINX = {
    "time_local": "01/Feb/2026:12:00:03 +0200",
    "msec": "1769940003.25",
    "model": "a",
    "prompt_tokens": "11",
    "completion_tokens": 5.0,
}
EPOCH_MS = {"ts": 1769940004000, "Model Name": 7, "Prompt Tokens": 2, "output-tokens": 2}


def write(path: Path, entries: list[object]) -> Path:
    """A log of these entries."""
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


def test_usual_gateways_are_understood(tmp_path: Path) -> None:
    """Names, nesting and times of LiteLLM, Envoy, nginx and OpenAI-like logs need no options. Of nginx's times the one
    with fractions of a second counts, numbers are names, and signs and capitals do not matter beside the usual name."""
    log = read_trace(write(tmp_path / "x.jsonl", [NGINX, EPOCH_MS, LITELLM, ENVOY]))
    assert log.names == ("7", "a", "b")
    assert log.time_s.tolist() == [0.0, 1.5, 3.25, 4.0]
    assert log.input_tokens.tolist() == [9, 7, 11, 2]
    assert log.output_tokens.tolist() == [3, 1, 5, 2]
    assert log.start_s == 1769940000.0


def test_other_lines_are_counted(tmp_path: Path) -> None:
    """Health checks, failures and the base model are left out, and said to be."""
    failed = {"time": 5, "model": "a", "status": 500}
    empty = {"time": 6, "model": "a", "prompt_tokens": 4, "completion_tokens": 0}
    base = {"time": 7, "model": "base", "prompt_tokens": 4, "completion_tokens": 4}
    good = {"time": 8, "model": "vllm/a", "prompt_tokens": 4, "completion_tokens": 4}
    path = write(tmp_path / "x.jsonl", [{"path": "/health"}, failed, empty, base, good, ""])
    log = read_trace(path, Fields(skip=("base",), strip_prefix="vllm/"))
    assert (len(log), log.dropped, log.other) == (1, 2, 2)
    assert log.names == ("a",)


@pytest.mark.parametrize("sign", ["-", "NULL", "null", "None", "NaN", "\\N"])
def test_signs_of_no_value(sign: str, tmp_path: Path) -> None:
    """Requests whose tokens or model are "-", as web servers write it, NULL or NaN, as databases do, are left out."""
    known = {"time": 1, "model": "a", "prompt_tokens": "3", "completion_tokens": "4"}
    entries = [known, {**known, "completion_tokens": sign}, {**known, "model": sign}, {**known, "time": 2}]
    log = read_trace(write(tmp_path / "log.jsonl", entries))
    assert (len(log), log.names, log.dropped, log.other) == (2, ("a",), 1, 1)


def test_own_keys_and_gzip(tmp_path: Path) -> None:
    """A log with names of its own is read where options name the fields."""
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"a": {"t": 1}, "m": "x", "i": 3, "o": 4}).encode()))
    log = read_trace(path, Fields(keys={"time": "a.t", "model": "m", "input": "i", "output": "o"}))
    assert log.names == ("x",)


def test_a_known_trace_takes_the_column_of_its_adapters(tmp_path: Path) -> None:
    """A trace that is known by its columns keeps them beside others, of which a key or its name says the adapters."""
    path = tmp_path / "burst.csv"
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path.write_text(f"{head}\n1,chat,5,6,11,API log\n")
    assert read_trace(path).names == ()
    assert read_trace(path, Fields(keys={"model": "Model"})).names == ("chat",)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens,Tune\n1,5,6,sql\n")
    assert (read_trace(path).names, read_trace(path, Fields(keys={"model": "Tune"})).names) == ((), ("sql",))
    with pytest.raises(FileFormatError, match="Found: timestamp, contexttokens"):
        read_trace(path, Fields(keys={"model": "adapter"}))
    path.write_text(path.read_text().replace("Tune", "adapter_name"))
    assert read_trace(path).names == ("sql",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "row 1: expected JSON"),
        ('garbage\n{"time": 1, "model": "a", "prompt_tokens": 1}', "row 1: expected JSON"),
        (
            '{"time": 1, "model": "a", "status": 500, "prompt_tokens": 9, "completion_tokens": 0}',
            "at least one request with input and output tokens, got 1 request without",
        ),
        (
            '{"time": 1, "model": "a", "prompt_tokens": 9, "generated": 5}',
            "without output tokens. Found: .*--key output=NAME \\(",
        ),
        ("[1]", "row 1: expected a JSON object in each line or entry, got 1"),
        ('[\n{"time": 1}\n]', "got one without input tokens, output tokens"),
        ('{"a": 1}\n[1]', "row 2: expected a JSON object in each line or entry, got"),
        ('{\n"a": 1}\n{\n"a": 2}', r"row 3: expected one JSON list or object, got several: jq -c \. FILE"),
        ('[{"a": 1}]\n[{"a": 2}]', r"row 2: .*, got several: jq -c \.\[\] FILE"),
        ("[]", "expected at least one request, got none"),
        ('{"a": 1}', "--key time=NAME"),
        (f'{{"{"k" * 9000}": 1}}', f"Found: {'k' * 40}; --key"),
        ('{"time": 1, "model": [5], "prompt_tokens": 1, "completion_tokens": 1}', "column 'model'"),
        (
            '{"time": 1, "model": "a", "prompt_tokens": -1, "completion_tokens": 1}',
            "whole number from 0 to 1000000000, got -1",
        ),
        ('{"time": 1, "model": "a", "prompt_tokens": true, "completion_tokens": 1}', "expected a number, got True"),
        ('{"time": "soon", "model": "a", "prompt_tokens": 1, "completion_tokens": 1}', "expected a time"),
        ('{"time": 1e11, "model": "a", "prompt_tokens": 1, "completion_tokens": 1}', "1970 to 2199"),
        ('{"time": 1, "model": "a\\u0000", "prompt_tokens": 1, "completion_tokens": 1}', "control"),
        ('{"time": 1e300, "model": "a", "prompt_tokens": 1, "completion_tokens": 1}', "expected a time"),
        ('{"a":' * 100_000, "row 1: expected JSON: at most 64"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    """What breaks a rule is refused with its place and value."""
    with pytest.raises(FileFormatError, match=message):
        read_trace(write(tmp_path / "x.jsonl", [line]))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.dictionaries(
        st.sampled_from(["time", "model", "prompt_tokens", "completion_tokens", "usage", "ts", "x"]), inner, max_size=5
    ),
    max_leaves=8,
)


@given(st.lists(values, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_anything_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, entries: list[object]) -> None:
    """No line of JSON brings the reader down: it is read, or refused by our own error."""
    path = tmp_path_factory.mktemp("fuzz") / "x.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    try:
        log = read_trace(path)
    except PackerError:
        return
    assert len(log) >= 1


def test_nan_is_no_value(tmp_path: Path) -> None:
    """Programs write NaN, which is no JSON, for what they do not know: it is null, also in a line inside a record."""
    known = {"time": 1, "model": "a", "prompt_tokens": 3, "completion_tokens": 4, "latency": float("nan")}
    entries = [known, {"log": json.dumps(known)}, {**known, "prompt_tokens": float("nan")}]
    log = read_trace(write(tmp_path / "x.jsonl", [*entries]))
    assert (len(log), log.dropped, log.other) == (2, 1, 0)


@pytest.mark.parametrize("odd", [{"time": "soon"}, {"rank": "x"}, {"cached_tokens": 99}])
def test_failures_may_have_anything(tmp_path: Path, odd: dict[str, object]) -> None:
    """Cells of a failed request, whose line has no output, are not checked, also where it has an id."""
    known = {"time": 1, "id": "r", "model": "a", "prompt_tokens": 3, "completion_tokens": 4}
    log = read_trace(write(tmp_path / "x.jsonl", [known, {**known, "completion_tokens": 0, **odd}]))
    assert (len(log), log.dropped) == (1, 1)


def lines_of(k: int) -> list[dict[str, object]]:
    """A request as a proxy logs its start and a server its stream: its tokens come with the last line."""
    at, known = 1769940000 + 10 * k, {"id": f"chat-{k}", "model": f"a{k % 2}"}
    tokens = {"prompt_tokens": 10 + k, "completion_tokens": 0}
    last = {"time": at + 3, "id": f"chat-{k}", "usage": {**tokens, "completion_tokens": 5}}
    return [{"time": at, **known}, {"time": at + 1, **known, "usage": tokens}, last, last]


def test_lines_of_one_id_are_one_request(tmp_path: Path) -> None:
    """Chunks of a stream, start and end, and copies are one request, at its first time, in any order of lines."""
    log = read_trace(write(tmp_path / "x.jsonl", [each for k in range(4) for each in reversed(lines_of(k))]))
    assert (log.time_s.tolist(), log.names) == ([0.0, 10.0, 20.0, 30.0], ("a0", "a1"))
    assert (log.input_tokens.tolist(), log.output_tokens.tolist()) == ([10, 11, 12, 13], [5] * 4)
    assert log.notes == ["joined 12 lines to others with the same id, as parts of one request"]
    stray = reversed([{**each, "time": 86400 + k} for k, each in enumerate(lines_of(16))])
    entries = [*(each for k in range(16) for each in lines_of(k)), *stray]
    assert "line 68, 1970-01-02" in " ".join(read_trace(write(tmp_path / "y.jsonl", entries)).notes), "its first time"


def test_a_part_without_the_prompt_hides_it_not(tmp_path: Path) -> None:
    """The end of a stream may have the output alone: the prompt is that of an earlier line, the largest known."""
    entries = [*lines_of(1)[:2], {"time": 1769940014, "id": "chat-1", "prompt_tokens": 0, "completion_tokens": 5}]
    log = read_trace(write(tmp_path / "x.jsonl", [*entries, *lines_of(2)]))
    assert (log.input_tokens.tolist(), log.output_tokens.tolist()) == ([11, 12], [5, 5])


def test_ids_that_name_no_requests_join_nothing(tmp_path: Path) -> None:
    """An id of something else, as a container, has requests with other prompts or falling outputs, or many alike: each
    counts, and the user is told; one such id among those of requests is counted line by line, too."""
    entries = [
        {"time": 5 + k, "id": f"c{k % 2}", "model": "a", "prompt_tokens": 9 + k // 2, "completion_tokens": 3}
        for k in range(8)
    ]
    log = read_trace(write(tmp_path / "x.jsonl", [*entries]))
    said = "2 of 2 ids are in several lines that are no parts of one request: they count one by one"
    assert (len(log), log.notes) == (8, [said])
    log = read_trace(write(tmp_path / "x.jsonl", [{**each, "prompt_tokens": 9} for each in entries]))
    assert (len(log), log.notes) == (8, [said])
    log = read_trace(write(tmp_path / "x.jsonl", [*entries[::2], *lines_of(1), *lines_of(2)]))
    assert (len(log), len(log.notes)) == (6, 2)
    rising = [{**entries[0], "id": "r", "prompt_tokens": 9 + k, "completion_tokens": 3 + k} for k in range(2)]
    assert len(read_trace(write(tmp_path / "x.jsonl", [*rising]))) == 2
    thrice = [*lines_of(1), lines_of(1)[-1]]
    assert len(read_trace(write(tmp_path / "x.jsonl", [*thrice, *lines_of(2)]))) == 2


@pytest.mark.parametrize("other", [{"model": "b"}, {"completion_tokens": 2}, {"time": 4000}])
def test_lines_that_are_no_parts_are_not_joined(tmp_path: Path, other: dict[str, object]) -> None:
    """Two lines of one id are two requests if their adapters differ, the output falls, or an hour is between them."""
    known = {"time": 5, "id": "c", "model": "a", "prompt_tokens": 9, "completion_tokens": 3}
    assert len(read_trace(write(tmp_path / "x.jsonl", [known, {**known, "time": 6, **other}]))) == 2


def test_a_day_is_no_time(tmp_path: Path) -> None:
    """A column `Date`, as Datadog's, has the times if it has times of day: with days alone nothing says when in it."""
    head, tokens = "Date,@model,@prompt_tokens,@completion_tokens", "a,3,4"
    path = tmp_path / "x.csv"
    path.write_text(f"{head}\n2026-02-01T10:00:00.5Z,{tokens}\n")
    assert read_trace(path).start_s == 1769940000.5
    path.write_text(f"{head}\n2026-02-01,{tokens}\n")
    with pytest.raises(FileFormatError, match="expected a time from 1970"):
        read_trace(path)


def test_a_time_of_day_is_joined_to_its_date(tmp_path: Path) -> None:
    """Of separate columns for day and time of day, also in a data frame, one time is made; a bad date is shown."""
    lines = ("Date,Time,model,prompt_tokens,completion_tokens", "2026-02-01,23:59:59.5,a,3,4", "2026-02-02,00:00,a,3,4")
    text = tmp_path / "log.csv"
    text.write_text("\n".join(lines))
    kinds = {"days": pl.read_csv(text, try_parse_dates=True)}
    kinds["midnights"] = kinds["days"].with_columns(pl.col("Date").cast(pl.Datetime))
    for name, frame in kinds.items():
        frame.write_parquet(tmp_path / name)
    for path in (text, *(tmp_path / name for name in kinds)):
        log = read_trace(path)
        assert (log.start_s, log.span_s) == (1769990399.5, 0.5)
    (tmp_path / "iso").write_text(text.read_text().replace("-01,", "-01T00:00:00,").replace("-02,", "-02T00:00:00.0Z,"))
    assert read_trace(tmp_path / "iso").span_s == 0.5
    text.write_text(text.read_text().replace("2026-02-01", "1/2/2026"))
    with pytest.raises(
        FileFormatError, match=r"got '23:59:59.5' on '1/2/2026': is the month 1 or 2\? Write 2026-01-02 or 2026-02-01"
    ):
        read_trace(text)


def test_a_log_is_known_by_its_columns(tmp_path: Path) -> None:
    """The same requests as JSON lines, CSV and Parquet, under any name of file; an unknown column changes nothing."""
    rows = [
        {"created": 1769940000 + k, "model": name, "status": 200, "prompt_tokens": 5, "completion_tokens": 6, "rank": 8}
        for k, name in enumerate("abb")
    ]
    frame = pl.DataFrame(rows)
    frame.write_csv(tmp_path / "requests.txt")
    frame.write_parquet(tmp_path / "requests.bin")
    write(tmp_path / "requests", [*rows])
    for path in tmp_path.iterdir():
        log = read_trace(path)
        assert (log.names, log.ranks, log.start_s) == (("a", "b"), (8, 8), 1769940000.0)
        assert log.time_s.tolist() == [0.0, 1.0, 2.0]


def test_a_log_without_models_names_no_adapters(tmp_path: Path) -> None:
    """Requests count although no column names their adapters; with some that are named, the others are left out."""
    entry = {"time": 5, "prompt_tokens": 9, "completion_tokens": 3}
    assert read_trace(write(tmp_path / "x", [entry, entry])).adapter is None
    log = read_trace(write(tmp_path / "x", [entry, {**entry, "model": "a"}]))
    assert (log.names, len(log), log.other) == (("a",), 1, 1)
    with pytest.raises(FileFormatError, match="--key"):
        read_trace(write(tmp_path / "x", [entry]), Fields({"model": "user"}))


@pytest.mark.parametrize("name", ["adapter_id", "lora_id", "modelId"])
def test_ids_of_adapters_name_them(tmp_path: Path, name: str) -> None:
    """LoRAX, Bedrock and Ray Serve call the name of an adapter or model its id; without it the requests of a log go to
    adapters that it does not have. A model in another column is the base of an adapter's id, and else counts first."""
    entry = {"time": 5, "prompt_tokens": 9, "completion_tokens": 3, name: "a"}
    assert read_trace(write(tmp_path / "x", [entry])).names == ("a",)
    both = read_trace(write(tmp_path / "x", [{**entry, "model": "b"}])).names
    assert both == (("b",) if name == "modelId" else ("a",))


def test_models_are_left_out_of_a_trace_too(tmp_path: Path) -> None:
    """Skipped models and prefixes of names mean the same in a trace of known columns."""
    path = tmp_path / "t.csv"
    head = "timestamp,adapter,rank,input_tokens,output_tokens,priority"
    path.write_text(f"{head}\n0,base,8,1,1,7\n1,v/a,16,2,2,3\n")
    log = read_trace(path, Fields(skip=("base",), strip_prefix="v/"))
    assert (log.names, log.ranks, log.other, len(log)) == (("a",), (16,), 1, 1)
    assert log.priority is not None
    assert log.priority.tolist() == [3]
    with pytest.raises(FileFormatError, match="2 to base, v/a alone"):
        read_trace(path, Fields(skip=("base", "v/a")))


def test_a_session_may_have_any_name(tmp_path: Path) -> None:
    """JSON may hold half of a character as the name of a session: requests of the same name are one session."""
    turns = [
        {**EPOCH_MS, "ts": EPOCH_MS["ts"] + 1000 * k, "session_id": name} for k, name in enumerate("\ud800\ud801\ud800")
    ]
    first, other, last = read_trace(write(tmp_path / "x.jsonl", [*turns])).sessions.tolist()
    assert first == last != other


def test_durations_are_no_times(tmp_path: Path) -> None:
    """A column of times may hold durations in another log: a column with times since 1970 is preferred, and `msec`, in
    which nginx logs such times, counts with them only."""
    rest = {"model": "a", "prompt_tokens": 4, "completion_tokens": 4}
    for about in ({"msec": "231"}, {"time": 2.5}):
        path = write(tmp_path / "x.jsonl", [{**about, "time_local": NGINX["time_local"], **rest}, {**NGINX, **about}])
        assert read_trace(path).start_s == 1769940003.0
    with pytest.raises(FileFormatError, match="Found: msec"):
        read_trace(write(tmp_path / "x.jsonl", [{"msec": 231, **rest}]))
    assert len(read_trace(tmp_path / "x.jsonl", Fields({"time": "msec"}))) == 1


@pytest.mark.parametrize("names", [("model", "prompt_tokens"), ("adapter", "input_tokens")])
def test_what_no_model_is_called_is_said(tmp_path: Path, names: tuple[str, str]) -> None:
    """Names to skip and a prefix that no request has are kept, in an access log and a trace: they may be misspelt."""
    outputs = {"model": "completion_tokens"}.get(names[0], "output_tokens")
    path = tmp_path / "x.csv"
    path.write_text(f"timestamp,{names[0]},{names[1]},{outputs}\n1,vllm/a,4,4\n2,vllm/base,4,4\n")
    log = read_trace(path, Fields(skip=("base", "bose"), strip_prefix="vllm/"))
    assert (log.names, log.other, log.unmet) == (("a",), 1, ("bose",))
    assert "names bose" in log.notes[0]
    assert read_trace(path, Fields(strip_prefix="hosted/")).unmet == ("hosted/",)
    path.write_text("timestamp,input_tokens,output_tokens\n1,4,4\n")
    assert read_trace(path, Fields(skip=("bose",))).unmet == ("bose",)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda line: {"timestamp": 5, "labels": {"app": "gw"}, "line": json.dumps(line)},
        lambda line: {"time": "1970-01-01T00:00:05Z", "stream": "stdout", "log": json.dumps(line) + "\n"},
        lambda line: {"_id": "7", "_source": {"@timestamp": 5, **line}},
        lambda line: {"@timestamp": 5, "@message": json.dumps(line)},
        lambda line: {"time": 5, **{f"@{key}": value for key, value in line.items()}},
        lambda line: {"created_at": 5, **line, "usage": json.dumps(line["usage"])},
        lambda line: {"created_at": 5, "model": line["model"], "tokens_in": 9, "tokens_out": 3},
        lambda line: {"TimeGenerated": 5, "ModelName": line["model"], "PromptTokens": 9, "CompletionTokens": 3},
        lambda line: {"started_at": 5, "ai": {"proxy": {"meta": {"request_model": "a"}, "usage": line["usage"]}}},
    ],
)
def test_lines_in_the_records_of_a_store_are_read(tmp_path: Path, wrap: Callable[[object], object]) -> None:
    """Loki, Docker, Elasticsearch, CloudWatch and Datadog keep a gateway's line inside their own, databases its usage
    as text; Cloudflare, Azure API Management and Kong have names of their own: a line counts alike in all."""
    line = {"model": "a", "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
    log = read_trace(write(tmp_path / "x.jsonl", [wrap(line)]))
    assert (log.names, log.start_s, log.input_tokens.tolist()) == (("a",), 5.0, [9])


def test_a_key_that_no_row_has_is_named(tmp_path: Path) -> None:
    """A misspelt --key is the fault, not the log: the message names it and the columns there are."""
    path = write(tmp_path / "x.jsonl", [{"time": 5, "model": "a", "prompt_tokens": 4, "completion_tokens": 4}])
    for name in ("model", "time"):
        with pytest.raises(FileFormatError, match=f"'foo': .*--key {name} .* Found: time, model, prompt_tok"):
            read_trace(path, Fields({name: "foo"}))


def test_requests_without_tokens_are_said_with_their_share(tmp_path: Path) -> None:
    """No rate counts requests without tokens: a user must see that they are most of a log."""
    bare = {"time": 5, "model": "a", "usage": None}
    log = read_trace(write(tmp_path / "x.jsonl", [{**bare, "prompt_tokens": 4, "completion_tokens": 4}, bare, bare]))
    assert log.notes == ["left out 2 of 3 requests, which have no tokens: no rate counts them"]
