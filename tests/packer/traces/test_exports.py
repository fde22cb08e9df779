"""Exports of collectors, databases and portals are logs of requests, too: batches, lists, deep objects, odd times."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from packer.errors import FileFormatError
from packer.traces.read import read_trace


def write(path: Path, entries: list[object]) -> Path:
    """A log of these entries."""
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


OTEL = {
    "startTimeUnixNano": "1770000005000000000",
    "traceId": "t1",
    "attributes": [
        {"key": "gen_ai.request.model", "value": {"stringValue": "a"}},
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "9"}},
        {"key": "gen_ai.usage.output_tokens", "value": {"intValue": 3}},
    ],
}


def test_batches_of_a_collector_are_read(tmp_path: Path) -> None:
    """A line of OpenTelemetry's file exporter holds many spans or records: each with tokens is a request, once where
    the spans of a gateway and of its server have one trace."""
    other = {**OTEL, "startTimeUnixNano": "1770000007000000000", "traceId": "t2"}
    health = {"startTimeUnixNano": "1770000008000000000", "name": "GET /health", "attributes": []}
    record = {
        "timeUnixNano": "1770000009000000000",
        "body": {"stringValue": "POST /v1"},
        "attributes": OTEL["attributes"],
    }
    spans = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": [OTEL, health]}, {"spans": [other, other]}]}]}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}
    for wrap in (json.dumps, lambda line: json.dumps(line, indent=1)):
        found = [read_trace(write(tmp_path / "x.json", [wrap(line)])) for line in (spans, logs)]
        assert [(log.names, log.start_s, log.time_s.tolist(), log.output_tokens.tolist()) for log in found] == [
            (("a",), 1770000005.0, [0.0, 2.0], [3, 3]),
            (("a",), 1770000009.0, [0.0], [3]),
        ]
        assert (found[0].other, found[0].said) == (
            1,
            ("joined 1 line to others with the same id, as parts of one request",),
        )


def test_a_server_under_a_gateway_is_no_second_request(tmp_path: Path) -> None:
    """vLLM's span in the trace of a gateway's has the same tokens and the base model's name: the load would double."""
    names = {"gen_ai.response.model": "base", "gen_ai.usage.prompt_tokens": "9", "gen_ai.usage.completion_tokens": "3"}
    inner = {**OTEL, "startTimeUnixNano": "1770000005100000000"}
    inner["attributes"] = [{"key": key, "value": {"stringValue": value}} for key, value in names.items()]
    log = read_trace(write(tmp_path / "x.jsonl", [{"resourceSpans": [{"scopeSpans": [{"spans": [inner, OTEL]}]}]}]))
    assert (log.names, log.start_s) == (("a",), 1770000005.0)


def test_two_adapters_in_one_trace_are_two_requests(tmp_path: Path) -> None:
    """An agent asks two adapters the same in one trace: answers of different lengths are those of two requests."""
    one = {"time": 1770000005, "trace_id": "t", "model": "a", "prompt_tokens": 9, "completion_tokens": 3}
    log = read_trace(write(tmp_path / "x.jsonl", [one, one | {"model": "b", "completion_tokens": 5}]))
    assert (log.names, len(log)) == (("a", "b"), 2)


@pytest.mark.parametrize(
    "wrap", [lambda rows: rows, lambda rows: {"total": 2, "data": rows}, lambda rows: {"hits": {"hits": rows}}]
)
def test_a_list_of_requests_is_a_log(tmp_path: Path, wrap: Callable[[object], object]) -> None:
    """Exports and answers of APIs are one list, alone or inside an object: its entries count as lines do."""
    rows = [{"startTime": 5, "model": "a", "usageDetails": {"input": 9, "output": 3, "total": 12}}, {"startTime": 7}]
    for indent in (None, 2):
        path = tmp_path / "x.json"
        path.write_text(json.dumps(wrap(rows), indent=indent))
        if path.read_text().startswith("{") and not indent:
            continue  # an object on a line is an entry itself
        log = read_trace(path)
        assert (log.names, log.start_s, log.input_tokens.tolist(), log.other) == (("a",), 5.0, [9], 1)


def test_counts_deep_inside_others_are_found(tmp_path: Path) -> None:
    """Gateways keep a usage under objects of their own: it is known by its last name, after all usual ones."""
    deep = {
        "time": 5,
        "event": {"obj": {"lora_path": "a"}, "out": {"meta": {"prompt_tokens": 9, "completion_tokens": 3}}},
    }
    near = {
        "time": 6,
        "model": "b",
        "usage": {"prompt_tokens": 8, "completion_tokens": 2},
        "budget": {"input_tokens": 1},
    }
    log = read_trace(write(tmp_path / "x.jsonl", [deep, near]))
    assert (log.names, log.input_tokens.tolist()) == (("a", "b"), [9, 8])


@pytest.mark.parametrize("cell", ["2/3/2026, 1:05:00.250 PM", "2/3/2026, 1:05:00 PM", "02/03/2026 01:05:00 PM"])
def test_times_of_a_portal_are_read(tmp_path: Path, cell: str) -> None:
    """Azure's portal exports the zone in a column's name and times with AM and PM, the month first."""
    path = write(tmp_path / "x.csv", ["TimeGenerated [UTC],ModelName,PromptTokens,CompletionTokens", f'"{cell}",a,9,3'])
    assert int(read_trace(path).start_s) == 1770123900


def test_the_table_of_simulated_requests_is_a_log(tmp_path: Path) -> None:
    """What packer simulate writes with --requests is read as it is."""
    header = "request,adapter,server,sent_s,first_s,finish_s,input_tokens,output_tokens"
    path = write(tmp_path / "x.csv", [header, "0,a,0,0.5,0.7,0.9,9,3", "1,b,0,2.5,2.7,2.9,8,4"])
    log = read_trace(path)
    assert (log.names, log.time_s.tolist(), log.output_tokens.tolist()) == (("a", "b"), [0.0, 2.0], [3, 4])


LAYOUTS = ("time,model,input_tokens,output_tokens", "timestamp,adapter,input_tokens,output_tokens")


@pytest.mark.parametrize("header", LAYOUTS)
@pytest.mark.parametrize("form", ["%d/%m/%Y %H:%M:%S", "%m/%d/%Y, %H:%M:%S", "%d/%m/%Y %H:%M", "%d.%m.%Y %H:%M:%S"])
def test_dates_that_can_be_meant_in_one_way_are_read(tmp_path: Path, header: str, form: str) -> None:
    """A number above twelve is a day, before or behind the month; with points the day is first."""
    for day, hour in ((31, 10), (31, 9), (12, 9)):
        moment = datetime(2026, 12, day, hour, 7, tzinfo=UTC)
        for cell in {moment.strftime(form), moment.strftime(form).replace(" 09:", " 9:")}:
            path = write(tmp_path / "x.csv", [header, f'"{cell}",a,9,3'])
            assert read_trace(path).start_s == moment.timestamp()


@pytest.mark.parametrize("header", LAYOUTS)
@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("05/12/2026 10:00:00", "is the month 5 or 12\\? Write 2026-05-12 or 2026-12-05"),
        ("1798671600,250", "write it with a decimal point"),
    ],
)
def test_times_that_can_be_meant_in_two_ways_are_refused(tmp_path: Path, header: str, cell: str, says: str) -> None:
    """A date whose day may be its month is refused with its row, though the one before it is clear."""
    first = "13/12/2026 10:00:00" if "/" in cell else "1798671600.000"
    path = write(tmp_path / "x.csv", [header, f"{first},a,9,3", f'"{cell}",a,9,3', ""])
    with pytest.raises(FileFormatError, match=f"row 3, column 'time[^']*': expected .*got '{cell}': {says}"):
        read_trace(path)


@pytest.mark.parametrize("sign", [";", "\t", "|"])
@pytest.mark.parametrize(
    "names", [("time", "input_tokens", "output_tokens"), ("timestamp", "input_tokens", "output_tokens")]
)
def test_other_signs_separate_the_cells(tmp_path: Path, sign: str, names: tuple[str, ...]) -> None:
    """Semicolons, tabs and bars separate cells as commas do, if the header has no comma; decimals have points."""
    path = write(tmp_path / "log.csv", [sign.join(names), f"1.5{sign}3{sign}4", f"4{sign}5{sign}6"])
    log = read_trace(path)
    assert (log.time_s.tolist(), log.input_tokens.tolist()) == ([0.0, 2.5], [3, 5])
    path.write_text(path.read_text().replace("3", "3,0"))
    with pytest.raises(FileFormatError, match="row 2, column 'input_tokens': expected a number without commas"):
        read_trace(path)
