"""Workload files."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.adapter import IDLE_RATE, Adapter
from packer.arrival import Arrivals, Bursts, RequestTrace
from packer.blocks import Blocks
from packer.errors import FileFormatError, IncompatibleError, OutputError, reading
from packer.goal import Limits, Slo
from packer.io.tables import csv_rows
from packer.io.workload_schema import workload_from_dict, workload_to_dict
from packer.io.workloads import OPTIONAL, REQUIRED, read_workload, workload_from_rows, write_workload
from packer.lengths import Lengths
from packer.workload import SHAREGPT_INPUT, SHAREGPT_OUTPUT, Workload

TABLES = (".csv", ".csv.gz", ".parquet", ".parquet.gz")
DOCUMENTS = (".json", ".json.gz", ".yaml", ".yml")

names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
means = st.floats(1.0, 1e6)
gamma = st.builds(Lengths.gamma, means, st.floats(0.01, 10.0))
any_lengths = st.one_of(
    gamma,
    st.builds(Lengths.constant, means),
    st.builds(
        Lengths.lognormal,
        means,
        st.just(0.0) | st.floats(1e-4, 10.0),
        low=st.integers(1, 9),
        high=st.none() | st.just(99),
    ),
    st.lists(st.floats(1.0, 1e5), min_size=1, max_size=5).map(Lengths.empirical),
)


def fleets(lengths: st.SearchStrategy[Lengths], arrivals: st.SearchStrategy[Arrivals]) -> st.SearchStrategy[Workload]:
    """Any workload with such lengths and arrivals."""
    adapter = st.tuples(st.integers(1, 512), st.floats(1e-6, 1e5), st.none() | lengths, st.none() | lengths)
    rows = st.dictionaries(names, adapter, min_size=1, max_size=6)
    return st.builds(
        lambda found, models, i, o, c, a: Workload(
            [
                Adapter(name, *row, model=models and models[k % len(models)])
                for k, (name, row) in enumerate(found.items())
            ],
            i,
            o,
            c,
            a,
            "fleet",
        ),
        rows,
        st.none() | st.lists(names, min_size=1, max_size=3),
        lengths,
        lengths,
        st.floats(-1.0, 1.0),
        arrivals,
    )


request_trace = RequestTrace(np.array([0.0, 1 / 3]), *(np.array([0, 0]) + k for k in (0, 5, 7)))
trace = Arrivals("trace", trace=request_trace)
every_field = Arrivals("trace", trace=replace(
    request_trace, blocks=Blocks(np.array([0, 1, 2]), np.array([4, 4]), 4), end_s=9.0, sessions=np.array([0, 0]),
    priority=np.array([2, 1]), step_s=0.5, start_s=7.0,
))  # fmt: skip
any_arrivals = st.one_of(
    st.just(Arrivals()),
    st.builds(Arrivals, st.just("lognormal"), st.floats(0.0, 9.0)),
    st.builds(Arrivals, st.just("piecewise"), factors=st.just((1.0, 0.5))),
    st.just(Arrivals("unpredictable", period_s=60.0, span=2.0)),
    st.just(trace),
    st.just(every_field),
    st.builds(request_trace.faster, st.floats(0.1, 9.0)).map(lambda part: Arrivals("trace", trace=part)),
    st.just(Arrivals("bursty", common=Bursts(1.5, ((8.0, 0.25), (60.0, 0.75)))).following((30.0, 0.5, 1.5))),
)


def same(a: Workload, b: Workload) -> bool:
    """Whether two workloads are equal, traces included."""
    return json.dumps(workload_to_dict(a)) == json.dumps(workload_to_dict(b))


@settings(max_examples=80, deadline=None)
@given(fleet=fleets(any_lengths, any_arrivals))
def test_documents_hold_everything(fleet: Workload) -> None:
    """A workload in the shape of JSON comes back exactly: lengths, correlation, arrivals, traces."""
    text = json.dumps(workload_to_dict(fleet))
    again = workload_from_dict(json.loads(text))
    assert same(again, fleet)
    assert again.adapters == fleet.adapters
    assert again.fingerprint == fleet.fingerprint


@settings(max_examples=60, deadline=None)
@given(fleet=fleets(gamma, st.just(Arrivals())))
def test_tables_hold_rates_ranks_and_lengths(tmp_path_factory: pytest.TempPathFactory, fleet: Workload) -> None:
    """A fleet of gamma lengths comes back from CSV with the same columns, spreads and correlation."""
    path = tmp_path_factory.mktemp("tables") / "fleet.csv"
    try:
        write_workload(fleet, path)
    except IncompatibleError:
        assert any(name != name.strip() for name in (*fleet.names, *fleet.models))
        return
    again = read_workload(path)
    assert again.names == fleet.names
    assert again.length_correlation == fleet.length_correlation
    for column in ("ranks", "rates", "mean_input_tokens", "mean_output_tokens"):
        assert np.array_equal(getattr(again, column), getattr(fleet, column))
    for one, two in zip(again.adapters, fleet.adapters, strict=True):
        assert (one.input_tokens or SHAREGPT_INPUT).cv == (two.input_tokens or fleet.input_tokens).cv


@pytest.mark.parametrize("ending", [*TABLES, *DOCUMENTS])
def test_every_format_round_trips(tmp_path: Path, ending: str) -> None:
    """Each ending writes a file that reads back the same, named after the file."""
    fleet = Workload(
        [Adapter('#1, "x"\u2028y', 8, 0.1), Adapter("1e3", 16, 1 / 3, Lengths.gamma(10.0, 0.7))],
        length_correlation=0.25,
        name="f",
    )
    path = tmp_path / f"f{ending}"
    write_workload(fleet, path, comments=["hello", "two\nlines"])
    assert same(read_workload(path), fleet)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == ending.endswith(".gz")
    first = path.read_bytes()
    write_workload(fleet, path, comments=["hello", "two\nlines"], force=True)
    assert path.read_bytes() == first
    with pytest.raises(OutputError, match="--force"):
        write_workload(fleet, path)


@pytest.mark.parametrize("ending", [*TABLES, *DOCUMENTS])
def test_bursts_round_trip(tmp_path: Path, ending: str) -> None:
    """Common and own bursts, and a trend beside them or alone, come back exactly from every format."""
    bursts = Bursts(2.141, ((0.1, 0.056), (8.1, 0.944))), Bursts(1 / 3, ((60.0, 1.0),))
    pairs = (bursts, (bursts[0], None), (None, bursts[1]))
    bursty = [Arrivals("bursty", common=common, own=own) for common, own in pairs]
    for arrivals in (*bursty, bursty[0].following((85.17, 1 / 3, 5 / 3)), Arrivals().following((300.0, 0.5, 1.5))):
        fleet = Workload([Adapter("a", 8, 0.1), Adapter("b", 8, 0.1)], arrivals=arrivals, name="f")
        write_workload(fleet, tmp_path / f"f{ending}", force=True)
        assert read_workload(tmp_path / f"f{ending}").arrivals == arrivals


WRONG = {
    "bursts": ["2", "2;8", "x;8:1", "2;8:0.5", "2;-1:1", "2;8:1:1", "nan;8:1", "2;8:nan"],
    "trend": ["300", "300;x", "0.1;1", "300;-1;2", "300;0;0", "nan;1", "300;nan", ";1", "300;1;"],
}


@pytest.mark.parametrize(("column", "cell"), [(key, cell) for key, cells in WRONG.items() for cell in cells])
def test_wrong_bursts_and_trends_are_named(column: str, cell: str) -> None:
    """A malformed cell, or a trend without a load, is refused with its row and column."""
    with pytest.raises(FileFormatError, match=f"row 2, column '{column}'"):
        read_csv(f"adapter,rank,rate,{column}\na,8,1,{cell}\n")


def read_csv(text: str) -> Workload:
    with reading("f.csv"):
        names, rows = csv_rows(text)
        assert set(names) <= {*REQUIRED, *OPTIONAL}
        return workload_from_rows(rows, "f")


def test_plain_columns_take_sharegpt_shapes() -> None:
    """Without lengths an adapter has the workload's; a mean alone keeps ShareGPT's spread."""
    fleet = read_csv("adapter,rank,rate,input_tokens,output_tokens\na,8,0.1,,\nb,16.0,2,100,50.5\n")
    assert fleet.adapters[0] == Adapter("a", 8, 0.1)
    assert fleet.adapters[1] == Adapter("b", 16, 2.0, SHAREGPT_INPUT.scaled(100.0), SHAREGPT_OUTPUT.scaled(50.5))


def test_a_rate_of_0_is_an_idle_adapter(tmp_path: Path) -> None:
    """An adapter that is registered but sends nothing is part of the fleet, so that it gets a server."""
    path = tmp_path / "fleet.json"
    path.write_text('[{"name": "a", "rank": 8, "rate": 0}, {"name": "b", "rank": 8, "rate": 2}]')
    for fleet in (read_csv("adapter,rank,rate\na,8,0\nb,8,2\n"), read_workload(path)):
        assert fleet.rates.tolist() == [IDLE_RATE, 2.0]


def test_empty_columns_of_spreadsheets_are_none(tmp_path: Path) -> None:
    """Empty cells beyond the last column, of the header or of rows, and empty rows are passed over."""
    path = tmp_path / "fleet.csv"
    path.write_bytes(b"\xef\xbb\xbfadapter,rank,rate,,\r\na,8,0.5,,\r\n,,,,\r\nb,16,0.25,,,\r\n")
    assert [(each.name, each.rank, each.rate) for each in read_workload(path).adapters] == [
        ("a", 8, 0.5),
        ("b", 16, 0.25),
    ]


def test_comments_blanks_and_case_of_the_header() -> None:
    """Comment lines, blank lines, blanks around cells and the header's case don't matter."""
    fleet = read_csv('# made by hand\n\n Adapter , RANK,rate\n# a comment\na , 8, 0.1\n\n"#b",8,0.1\n')
    assert fleet.names == ("a", "#b")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,7.5,1", "row 2, column 'rank': expected a whole number from 0 to 512, got '7.5'"),
        ("a,-1,1", "row 2, column 'rank': .*got '-1'"),
        ("a,1e9,1", "row 2, column 'rank': .*got '1e9'"),
        ("a,x,1", "row 2, column 'rank': expected a number, got 'x'"),
        ("a,8,-1", "row 2, column 'rate': .*got '-1'"),
        ("a,8,1000000.5", "row 2, column 'rate': .*got '1000000.5'"),
        ("a,8,nan", "row 2, column 'rate': .*got 'nan'"),
        ("a,8,inf", "row 2, column 'rate': .*got 'inf'"),
        ("a,8,1_0", "row 2, column 'rate': expected a number, got '1_0'"),
        ("a,8,", "row 2, column 'rate': expected a number, got an empty cell"),
        (",8,1", "row 2, column 'adapter': expected text, got an empty cell"),
        ("a,8", "row 2: expected 3 cells as in the header, got 2"),
        ("a,8,1,2", "row 2: expected 3 cells as in the header, got 4"),
        ("a,8,1\n# c\n\na,8,1", "row 5, column 'adapter': expected unique names, got 'a' as in row 2"),
        ('"a\nb",8,1', "row 3, column 'adapter': .*control"),
        ('"a,8,1', "row 2: expected CSV: unexpected end of data"),
        ('"a"b,8,1', "row 2: expected CSV"),
        ("a" * 10**6 + ",8,1", "row 2: expected CSV: field larger than field limit"),
        ("a" * 10**5 + ",8,1", "row 2, column 'adapter': Expected a name"),
        ("", "expected at least one adapter, got 0"),
    ],
)
def test_bad_cells_are_located(rows: str, message: str) -> None:
    """Every bad cell is named by row and column, with the value received."""
    with pytest.raises(FileFormatError, match=f"^f.csv.*{message}"):
        read_csv(f"adapter,rank,rate\n{rows}\n")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("a0,8,0.1", r"'a0': unknown column \(is the header missing\?\)"),
        ("adapter,rank", "'rate': this column is missing"),
        ("adapter,rank,rte", r"'rte': unknown column \(did you mean 'rate'\?\)"),
        ("adapter,rank,rate,rate", "'rate': this column appears twice"),
        ("x,y", "Expected the columns adapter, rank, rate .* found: x, y"),
        ("timestamp,input_tokens,output_tokens", "requests have no adapters.*from-log"),
        ("timestamp,adapter,input_tokens,output_tokens", "requests have no ranks.*from-log"),
    ],
)
def test_bad_headers_are_explained(tmp_path: Path, header: str, message: str) -> None:
    """A header that isn't one says what was found and expected; a trace is recognised."""
    path = tmp_path / "f.csv"
    path.write_text(f"{header}\n" + ",".join("1" for _ in header.split(",")) + "\n")
    with pytest.raises(FileFormatError, match=message):
        read_workload(path)


def test_a_complete_trace_is_replayed(tmp_path: Path) -> None:
    """A trace whose requests name their adapter and its rank is a workload that replays it."""
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,adapter,rank,input_tokens,output_tokens\n0,a,8,5,6\n1,b,16,7,8\n2,a,8,9,10\n")
    fleet = read_workload(path)
    assert fleet.names == ("a", "b")
    assert fleet.ranks.tolist() == [8, 16]
    assert fleet.rates.tolist() == [1.0, 0.5]
    assert fleet.arrivals.trace is not None
    assert fleet.arrivals.trace.output_tokens.tolist() == [6, 8, 10]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"adapter": "a", "rank": 7.5, "rate": 1}], r"'adapters\.0\.rank': expected a valid integer, got 7\.5"),
        ([{"adapter": "a", "rank": 8, "rate": "1"}], r"'adapters\.0\.rate': .*got '1'"),
        ([{"adapter": "a", "rank": 8}], r"'adapters\.0\.rate': this key is missing"),
        ([{"adapter": "a", "rank": 8, "rate": 1, "x": 1}], r"'adapters\.0\.x': unknown key"),
        ([{"adapter": "a", "rank": -1, "rate": 1}], r"'adapters\.0': Expected the rank"),
        ([], "at least one adapter"),
        (3, "expected a table, got 3"),
        ({"adapters": [{"name": "a", "rank": 8, "rate": 1}] * 2}, "'a' twice"),
        ({"adapters": [], "input_tokens": {"kind": "gamma", "mean": 3}}, "gamma lengths to have a cv"),
        ({"adapters": [], "input_tokens": {"kind": "gamma", "cv": 3}}, "gamma lengths to have a mean"),
        ({"adapters": [], "input_tokens": {"kind": "empirical", "mean": 3}}, "empirical lengths to have values"),
        ({"adapters": [], "input_tokens": {"kind": "normal", "mean": 3}}, r"'input_tokens\.kind'"),
        ({"adapters": [], "arrivals": {"kind": "trace"}}, "'arrivals': Expected a trace"),
        ({"adapters": [], "arrivals": {"kind": "trace", "time_s": [0.0]}}, "'arrivals': Expected a trace to have"),
        (
            {
                "adapters": [],
                "arrivals": {k: [2**70] for k in ("adapter", "input_tokens", "output_tokens")}
                | {"kind": "trace", "time_s": [0.0]},
            },
            "'arrivals': Expected adapter of a request trace to be a row of whole numbers",
        ),
        ({"adapters": [], "length_correlation": 2}, "length_correlation"),
        ({"adapters": [], "slo": {"p97_ttft_ms": 500}}, "'slo': Unknown latency limit 'p97_ttft_ms'"),
        ({"schema": 2, "adapters": []}, "'schema': expected 1, got 2"),
    ],
)
def test_bad_documents_name_the_key(data: object, message: str) -> None:
    """Every bad value of a document is named by its key."""
    with pytest.raises(FileFormatError, match=f"^f.json.*{message}"), reading("f.json"):
        workload_from_dict(data)


def test_tables_refuse_what_they_cannot_hold(tmp_path: Path) -> None:
    """Rather than lose bounds, distributions or arrivals, a table is refused; nothing is left behind."""
    one = [Adapter("a", 8, 0.1)]
    for fleet in (
        Workload(one, Lengths.lognormal(100.0, 1.0)),
        Workload(one, Lengths.gamma(100.0, 1.0, high=50)),
        Workload(one, arrivals=Arrivals("lognormal", 2.0)),
        Workload([Adapter(" a", 8, 0.1)]),
    ):
        with pytest.raises(IncompatibleError, match=r"\.json"):
            write_workload(fleet, tmp_path / "f.csv")
    with pytest.raises(IncompatibleError, match="end in"):
        write_workload(Workload(one), tmp_path / "f.txt")
    assert list(tmp_path.iterdir()) == []


def test_parquet_types(tmp_path: Path) -> None:
    """Typed columns, nulls and whole floats are read as in CSV; a row is counted from 1."""
    frame = pl.DataFrame({"adapter": [1, 2], "rank": [8.0, 16.0], "rate": [0.5, None]})
    path = tmp_path / "f.parquet"
    frame.with_columns(rate=pl.lit(0.5)).write_parquet(path)
    assert read_workload(path).names == ("1", "2")
    frame.write_parquet(path)
    with pytest.raises(FileFormatError, match="row 2, column 'rate': expected a number, got an empty cell"):
        read_workload(path)
    data = io.BytesIO()
    frame.write_parquet(data)
    path.write_bytes(data.getvalue()[:-20])
    with pytest.raises(FileFormatError, match="damaged or cut short"):
        read_workload(path)


def test_unknown_endings_are_refused(tmp_path: Path) -> None:
    """The ending tells the format, so an unknown one is refused; a missing file is called missing first."""
    path = tmp_path / "fleet.txt"
    with pytest.raises(FileFormatError, match="no such file"):
        read_workload(path)
    path.write_text("adapter,rank,rate\na,8,0.1\n")
    with pytest.raises(FileFormatError, match=r"\.csv, \.tsv, \.json"):
        read_workload(path)
    gz = tmp_path / "fleet.csv.gz"
    gz.write_bytes(gzip.compress(path.read_bytes()))
    assert len(read_workload(gz)) == 1


@pytest.mark.parametrize("name", ["azure-conv-2023", "azure-code-2023", "paper-256"])
def test_examples_are_read(root: Path, name: str) -> None:
    """The example workloads that travel with the source are sound and named after their files."""
    fleet = read_workload(root / "examples" / "workloads" / f"{name}.csv")
    assert fleet.name == name
    assert len(fleet) == (256 if name == "paper-256" else 200)
    assert fleet.offered_tok_s > 6_000


@pytest.mark.parametrize("ending", [".csv", ".json"])
def test_base_requests_and_prefixes_round_trip(tmp_path: Path, ending: str) -> None:
    """Rank 0 and shared prefixes come back from a file; without a prefix nothing is written about one."""
    fleet = Workload([Adapter("base", 0, 1.0), Adapter("a", 8, 1.0, shared_prefix_tokens=300)], name="fleet")
    write_workload(fleet, tmp_path / f"fleet{ending}")
    assert read_workload(tmp_path / f"fleet{ending}") == fleet
    write_workload(replace(fleet, adapters=fleet.adapters[:1]), tmp_path / f"base{ending}")
    assert "shared_prefix" not in (tmp_path / f"base{ending}").read_text()


def test_classes_and_limits_round_trip(tmp_path: Path) -> None:
    """Tables hold the class of an adapter, documents the limits as well; a table with limits is refused."""
    classed = Workload([Adapter("a", 8, 1.0, slo_class="chat"), Adapter("b", 16, 0.5)], name="fleet")
    for ending in ("csv", "parquet", "json", "yaml"):
        path = tmp_path / f"fleet.{ending}"
        write_workload(classed, path)
        assert read_workload(path) == classed
    limited = replace(classed, slo=Slo(Limits(1500.0), (("chat", Limits(300.0, 50.0)),), 0.9))
    path = tmp_path / "limited.json"
    write_workload(limited, path)
    assert read_workload(path).slo == limited.slo
    for text in ("none", "ttft_ms=900,request_share=0.9", "p99_e2e_ms=9000,server.p99_ttft_ms=1;chat:median_ttft_ms=7"):
        other = replace(classed, slo=Slo.parse(text))
        write_workload(other, path, force=True)
        assert read_workload(path).slo == other.slo
    with pytest.raises(IncompatibleError, match="latency limits"):
        write_workload(limited, tmp_path / "limited.csv")
