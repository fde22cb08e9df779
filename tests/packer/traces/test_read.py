"""Reading traces."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import FileFormatError, ValidationError
from packer.io.tables import csv_rows
from packer.traces import read
from packer.traces.access_log import USUAL
from packer.traces.columns import FORMATS, looks_like_trace, recognise
from packer.traces.pattern import latest_rates
from packer.traces.read import read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    "2023-11-16 18:17:04.0781490,110,27\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1500, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
    '{"timestamp": 3052, "input_length": 512, "output_length": 26, "hash_ids": [46]}\n'
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
    "118,GPT-4,417,0,417,API log\n"
)
OURS = "timestamp,adapter,input_tokens,output_tokens,rank\n7.5,b,10,20,16\n5,a,30,40,8\n6,b,50,60,16\n"


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    """The Azure traces of 2023 and 2024 are read with their sub-second times."""
    trace = read_trace(write(tmp_path, "azure.csv", AZURE))
    assert trace.time_s == pytest.approx([0.0, 0.052, 0.098189], abs=1e-9)
    assert trace.input_tokens.tolist() == [4808, 3180, 110]
    assert trace.output_tokens.tolist() == [10, 8, 27]
    assert (trace.source, trace.adapter, trace.ranks) == ("azure.csv", None, None)
    later = read_trace(write(tmp_path, "azure2024.csv", AZURE_2024))
    assert later.time_s == pytest.approx([0.0, 0.99007])


def test_mooncake_counts_in_milliseconds(tmp_path: Path) -> None:
    """Mooncake's times are ms, its ids those of blocks of 512 tokens, full ones alone; CSV has the same times."""
    trace = read_trace(write(tmp_path, "mooncake.jsonl", MOONCAKE))
    assert trace.time_s == pytest.approx([0.0, 3.052])
    assert trace.input_tokens.tolist() == [1500, 512]
    assert trace.blocks is not None
    assert (trace.blocks.tokens, trace.blocks.starts.tolist(), trace.blocks.ids.tolist()) == (
        512,
        [0, 2, 3],
        [46, 47, 46],
    )
    few = write(tmp_path, "few.jsonl", MOONCAKE.replace("[46]", "[]"))
    with pytest.raises(
        FileFormatError, match="row 2, column 'hash_ids': expected an id for each 512 of the 512 tokens"
    ):
        read_trace(few)
    broken = write(tmp_path, "broken.jsonl", MOONCAKE.replace("[46]", "[47]"))
    with pytest.raises(FileFormatError, match=r"broken.jsonl, column 'hash_ids': .* id 47 of request 1 behind several"):
        read_trace(broken)
    table = "timestamp,input_length,output_length\n0,1500,52\n3052,512,26\n"
    assert np.array_equal(read_trace(write(tmp_path, "mooncake.csv", table)).time_s, trace.time_s)


@pytest.mark.parametrize("header", ["timestamp,input_tokens,output_tokens", "time,prompt_tokens,completion_tokens"])
def test_a_trace_is_named_after_its_file(tmp_path: Path, header: str) -> None:
    """Messages name the file, whether its columns are those of a trace or of an access log."""
    trace = read_trace(write(tmp_path, "one.csv", f"{header}\n1,10,10\n1,10,10\n"))
    with pytest.raises(ValidationError, match=r"got 2 requests at one time in one\.csv"):
        _ = trace.lasting_s


def test_burstgpt_failures_are_left_out(tmp_path: Path) -> None:
    """A request with 0 response tokens failed: it is left out and counted."""
    trace = read_trace(write(tmp_path, "burst.csv", BURSTGPT))
    assert len(trace) == 2
    assert trace.dropped == 1
    assert trace.span_s == 40.0
    assert trace.source == "burst.csv"


def test_own_format_is_sorted_and_names_adapters(tmp_path: Path) -> None:
    """Requests are put in order of time; adapters become indices; a rank belongs to its adapter."""
    trace = read_trace(write(tmp_path, "own.csv", OURS))
    assert trace.time_s.tolist() == [0.0, 1.0, 2.5]
    assert trace.names == ("a", "b")
    assert trace.adapter is not None
    assert trace.adapter.tolist() == [0, 1, 1]
    assert trace.ranks == (8, 16)
    assert trace.requests().output_tokens.tolist() == [40, 60, 20]


def test_parquet_and_gzip_say_the_same(tmp_path: Path) -> None:
    """The same requests read the same from CSV, gzip and Parquet, whatever the type of the time column."""
    times = [datetime(2023, 11, 16, tzinfo=UTC) + timedelta(milliseconds=250 * k) for k in range(3)]
    frame = pl.DataFrame({"timestamp": times, "input_tokens": [1, 2, 3], "output_tokens": [4.0, 5.0, 6.0]})
    frame = frame.with_columns(priority=pl.Series([1, 0, 2]))
    frame.write_parquet(tmp_path / "aware.parquet")
    frame.with_columns(pl.col("timestamp").dt.replace_time_zone(None)).write_parquet(tmp_path / "naive.parquet")
    frame.with_columns(timestamp=pl.Series([0.0, 0.25, 0.5])).write_parquet(tmp_path / "number.parquet")
    text = "timestamp,input_tokens,output_tokens,priority\n0,1,4,1\n0.25,2,5,0\n0.5,3,6,2\n"
    (tmp_path / "plain.csv.gz").write_bytes(gzip.compress(text.encode()))
    for path in tmp_path.iterdir():
        trace = read_trace(path)
        assert trace.time_s.tolist() == [0.0, 0.25, 0.5]
        assert trace.output_tokens.tolist() == [4, 5, 6]
        assert trace.priority is not None
        assert trace.priority.tolist() == [1, 0, 2]


cells = st.one_of(
    st.integers(0, 10**6).map(str), st.floats(allow_nan=True).map(str), st.sampled_from(["", "x", " 7 ", "1_0", "7.0"])
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=4))
def test_the_fast_reader_agrees_with_the_careful_one(rows: list[tuple[str, str, str]]) -> None:
    """Whatever the fast reader accepts, the cell-by-cell one reads the same; the rest it leaves to it."""
    text = "timestamp,input_tokens,output_tokens\n" + "".join(",".join(row) + "\n" for row in rows)
    kind = FORMATS[0]
    try:
        slow = read._slow(csv_rows(text)[1], kind)
    except FileFormatError:
        slow = None
    fast = read._fast(
        pl.DataFrame(
            {name: [row[k].strip() or None for row in rows] for k, name in enumerate(kind.required)},
            schema=dict.fromkeys(kind.required, pl.String),
        ),
        kind,
        1,
    )
    if fast is not None:
        assert slow is not None
        for name in ("time_s", "input_tokens", "output_tokens", "line"):
            assert fast[0][name].to_list() == slow[0][name].to_list()


@pytest.mark.parametrize(("odd", "more"), [("0", ""), ("0", ",1"), ("4900000000000", ""), ("86400000", "")])
def test_a_stray_date_is_left_out_and_named(tmp_path: Path, odd: str, more: str) -> None:
    """One time in another year, of a wrong clock or in another unit, must not make a log of decades with empty hours:
    the fast reader and the careful one leave its request out and name its line."""
    head = "# a comment\ntimestamp,input_tokens,output_tokens" + (",priority" if more else "")
    rows = [f"{1_769_940_000_000 + 1000 * k},10,5{more}" for k in range(30)]
    rows.insert(7, f"{odd},999,5{more}")
    log = read_trace(write(tmp_path, "x.csv", "\n".join([head, *rows])))
    assert (len(log), log.span_s, log.start_s) == (30, 29.0, 1_769_940_000.0)
    assert log.notes[0].startswith("left out 1 request far in time from all others: line 10, ")
    assert log.input_tokens.max() == 10


def test_clocks_that_are_set_back_are_said(tmp_path: Path) -> None:
    """Local times of the night in which summer time ends make one hour of two: that is said; of logs joined
    in a wrong order, or of the same hours, it is not."""
    hours = [np.linspace(h * 3600, h * 3600 + 3590, 60) for h in (1, 2, 2, 3)]
    path = tmp_path / "x.csv"
    for parts, said in ((hours, True), (hours[::-1], False), (hours[1:], False)):
        times = np.concatenate(parts)
        path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t},1,1\n" for t in times))
        notes = [note for note in read_trace(path).notes if "back by an hour" in note]
        assert ["at line 122," in note for note in notes] == [True] * said


def test_a_week_between_two_days_is_no_stray(tmp_path: Path) -> None:
    """Requests count wherever they are if they are more than a tenth of a log, or within three days or spans of the
    rest."""
    head, week_s = "timestamp,input_tokens,output_tokens", 7 * 86_400
    few = [*range(30), week_s // 3]
    for times in ([*range(30), *range(week_s, week_s + 5)], [*range(0, week_s, 20_000), 2 * week_s], few):
        log = read_trace(write(tmp_path, "x.csv", "\n".join([head, *(f"{each},10,5" for each in times)])))
        assert (len(log), log.said) == (len(times), ())


def test_a_number_of_eight_digits_is_no_date(tmp_path: Path) -> None:
    """Times are numbers if they can be, also where cells are read one by one."""
    text = "timestamp,input_tokens,output_tokens,priority\n10000101,1,4,1\n10000131,2,5,0\n"
    trace = read_trace(write(tmp_path, "plain.csv", text))
    assert (trace.start_s, trace.time_s.tolist()) == (10_000_101.0, [0.0, 30.0])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.csv", "a,b\n1,2\n", "without a time, input tokens, output tokens. Found: a, b"),
        ("f.csv", OURS.replace(",30,", ",-30,"), "row 3, column 'input_tokens': .*got '-30'"),
        ("f.csv", OURS.replace(",30,", ",3.5,"), "row 3, column 'input_tokens': .*got '3.5'"),
        ("f.csv", OURS.replace("5,a", "soon,a"), "row 3, column 'timestamp': expected seconds or a date .*got 'soon'"),
        ("f.csv", OURS.replace("5,a", "nan,a"), "row 3, column 'timestamp'"),
        ("f.csv", OURS.replace("5,a", "5,"), "row 3, column 'adapter': .*empty"),
        ("f.csv", OURS.replace("60,16", "60,8"), "got several for 'b': 8 and 16, the first in row 4"),
        ("f.csv", OURS.replace("60,16", "60,-1"), "row 4, column 'rank'"),
        ("f.csv", OURS.replace("60,16", "60"), "row 4: expected 5 cells"),
        (
            "f.csv",
            OURS.replace("\n5,a", "\n\n# c\n5,a").replace(",30,", ",x,"),
            "row 5, column 'input_tokens'",
        ),
        ("f.csv", AZURE.replace("18:17:04.03", "18:77:04.03"), "row 3, column 'timestamp'"),
        ("f.csv", "timestamp,input_tokens,output_tokens\n", "at least one request"),
        ("f.csv", "time,model,prompt_tokens,completion_tokens\n", "at least one request, got none: no line below"),
        ("f.csv", "timestamp,input_tokens,output_tokens\n1,0,0\n", "at least one request with tokens"),
        ("f.jsonl", MOONCAKE + "{\n", "row 3: expected JSON"),
        ("f.jsonl", MOONCAKE + "[]\n", "row 3: expected a JSON object"),
        ("f.jsonl", MOONCAKE + '{"timestamp": 1, "input_length": 2}\n', "row 3, column 'output_length': .*missing"),
        ("f.jsonl", MOONCAKE.replace("52", "true"), "row 1, column 'output_length': expected a number, got True"),
        ("f.jsonl", '{"timestamp": 1, "timestamp": 2}', "row 1: expected JSON: the key 'timestamp' appears twice"),
        ("f.parquet", f"PAR1{OURS}", "damaged"),
    ],
)
def test_bad_traces_are_located(tmp_path: Path, name: str, text: str, message: str) -> None:
    """Every bad trace says where and what, and what would have been known."""
    with pytest.raises(FileFormatError, match=message):
        read_trace(write(tmp_path, name, text))


def test_kinds_are_told_apart() -> None:
    """Each known set of columns is recognised as itself, and a workload is no trace."""
    for kind in FORMATS:
        assert recognise([*kind.required, kind.adapter]) is kind
        assert recognise([*kind.required, "status"]) is None
        assert looks_like_trace(kind.required)
    assert not looks_like_trace(["adapter", "rank", "rate", "input_tokens", "output_tokens"])


def test_a_blank_beside_a_number_keeps_the_fast_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading cell by cell takes ten times as long: blanks are no reason for it."""
    path = tmp_path / "t.csv"
    path.write_text("timestamp,input_tokens,output_tokens,adapter,rank\n 0 , 5, 6 ,a , 8\n1 ,7 , 8, b,16 \n")
    monkeypatch.setattr(read, "_slow", lambda *_: pytest.fail("read cell by cell"))
    trace = read.read_trace(path)
    assert trace.input_tokens.tolist() == [5, 7]
    assert (trace.names, trace.ranks) == (("a", "b"), (8, 16))


def test_names_have_no_control_characters(tmp_path: Path) -> None:
    """No command line takes a NUL; the error names the row."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "adapter": "a\\u0000"}\n')
    with pytest.raises(FileFormatError, match=r"row 1, column 'adapter': .*control characters"):
        read.read_trace(path)


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
@pytest.mark.parametrize("more", ["", ",priority"])
def test_numeric_times_since_1970_have_any_unit(tmp_path: Path, unit: int, more: str) -> None:
    """s, ms, µs and ns are told apart by their size, by the fast and the careful reader."""
    path, last = tmp_path / "log.csv", ",1" if more else ""
    rows = "".join(f"{(1_767_259_234 + k) * unit},a,8,10,5{last}\n" for k in range(30))
    path.write_text(f"timestamp,adapter,rank,input_tokens,output_tokens{more}\n{rows}", "utf-8")
    found = read_trace(path)
    assert found.span_s == pytest.approx(29.0)
    assert found.start_s == pytest.approx(1_767_259_234)


def test_a_row_that_is_still_written_is_left_out(tmp_path: Path) -> None:
    """A growing CSV may end within its first number."""
    path = tmp_path / "log.csv"
    rows = "".join(f"{k},a,10,5\n" for k in range(30))
    path.write_text(f"timestamp,model,input_tokens,output_tokens\n{rows}30.5", "utf-8")
    assert len(read_trace(path)) == 30


WHOLE = json.dumps({"time": 1, "model": "a", "prompt_tokens": 2, "completion_tokens": 3}).encode()


@pytest.mark.parametrize("end", [b'{"time": 2, "mo', '{"model": "é'.encode()[:-1], b"{", b" ", b""])
def test_a_line_that_is_being_written_is_left_out(tmp_path: Path, end: bytes) -> None:
    """Of a log that grows, the last line counts from its end on, and only there."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(WHOLE + b"\n" + WHOLE + b"\n" + end)
    assert len(read_trace(path)) == 2
    path.write_bytes(WHOLE + b"\n" + WHOLE)
    assert len(read_trace(path)) == 2
    path.write_bytes(WHOLE + b"\n" + b"{\n" + WHOLE + b"\n")
    with pytest.raises(FileFormatError, match="row 2"):
        read_trace(path)


def test_a_list_without_a_line_end_is_no_half_line(tmp_path: Path) -> None:
    """A log that may grow and is a list is read whole, or refused for what its entries lack."""
    (tmp_path / "x.json").write_text('[{"time": 1}]')
    with pytest.raises(FileFormatError, match=r"without input tokens, output tokens\. Found: time;"):
        read_trace(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b"[\n" + WHOLE + b",\n" + WHOLE + b"\n]")
    assert len(read_trace(tmp_path / "x.json")) == 2


def test_a_cut_last_line_is_said(tmp_path: Path) -> None:
    """A log that stops in the middle of its last line is read, and its user is told; cut elsewhere it is damaged."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(WHOLE + b"\n" + WHOLE[:-3])
    assert read_trace(path).notes == ["left out the last line, which is cut, or still being written"]
    path.write_bytes(WHOLE[:-3] + b"\n" + WHOLE)
    with pytest.raises(FileFormatError, match="row 1"):
        read_trace(path)


def test_a_log_with_a_cut_last_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the last line is half an object is known before the other lines are read, which may take minutes."""
    texts: list[str] = []
    monkeypatch.setattr(read, "decode", lambda data: texts.append(data.decode()) or texts[-1])
    path = tmp_path / "x.jsonl"
    path.write_bytes(WHOLE + b"\n" + WHOLE[:-3])
    assert len(read_trace(path)) == 1
    assert len(texts) == 1


def test_a_last_row_of_a_table_is_no_half_object(tmp_path: Path) -> None:
    """The last row of a CSV file counts without a line end, whatever the name of its adapter begins with."""
    path = tmp_path / "x.csv"
    path.write_text("adapter,time,input_tokens,output_tokens\na,1,2,3\n{b},2,2,3")
    assert len(read_trace(path)) == 2


def test_requests_to_the_lora_id_0_are_not_left_out(tmp_path: Path) -> None:
    """Some traces count adapters from 0; vLLM gives 0 to requests to the base model, which `--base 0` says. Left out,
    the load of either would be missing."""
    entries = [{"time": k, "prompt_tokens": 9, "completion_tokens": 3, "lora_id": k % 3} for k in range(6)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, entries)))
    log = read_trace(tmp_path / "x.jsonl")
    assert (sorted(log.names), len(log), log.other) == (["0", "1", "2"], 6, 0)


@pytest.mark.parametrize("kind", ["jsonl", "\ufeffjsonl", " jsonl", "csv"])
def test_of_a_growing_log_its_end_is_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes as long after a week as after an hour, and the rates of the last window are those of the log."""
    rows = [(1.79e9 + 2.0 * k, f"a{k % 3}", 10 + k % 7, 5) for k in range(5000)]
    names = ("time", "model", "prompt_tokens", "completion_tokens")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    if kind == "csv":
        lines = [",".join(names), *(",".join(map(str, row)) for row in rows)]
    path = tmp_path / "log"
    path.write_text(kind.removesuffix("jsonl").removesuffix("csv") + "\n".join(lines) + "\n", "utf-8")
    whole = read_trace(path)
    monkeypatch.setattr(read, "END_BYTES", 4000)
    found = read.read_latest(path, USUAL, 600.0)
    assert 300 < len(found) < 2000
    assert latest_rates(found, 600.0).tolist() == latest_rates(whole, 600.0).tolist()
    assert len(read.read_latest(path, USUAL, 1e6)) == 5000, "no part of it is long enough"


def test_the_end_of_a_log_that_cannot_be_read_alone_is_that_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed log, one with comments before its columns, and one document are read whole; a fault has its row."""
    monkeypatch.setattr(read, "END_BYTES", 200)
    text = "time,model,prompt_tokens,completion_tokens\n" + "".join(f"{k},a,10,5\n" for k in range(100))
    (tmp_path / "packed").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "comments").write_text("# a\n# b\n" + text)
    for name in ("packed", "comments"):
        assert len(read.read_latest(tmp_path / name, USUAL, 5.0)) == 100
    (tmp_path / "damaged").write_text(text + "100,a,-1,5\n101,a,10,5\n")
    with pytest.raises(FileFormatError, match="row 102"):
        read.read_latest(tmp_path / "damaged", USUAL, 5.0)
    with pytest.raises(FileFormatError, match="no such file"):
        read.read_latest(tmp_path / "none", USUAL, 5.0)
