"""`packer sweep` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from packer.cli import run
from packer.twin import sweep as twin_sweep

HEADER = "adapter,rank,rate,input_tokens,output_tokens\n"
ARGUMENTS = ["--adapters", "2:6:2", "--max-loras", "2,4", "--duration", "600", "--quiet"]


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    """A file of six adapters."""
    path = tmp_path / "fleet.csv"
    path.write_text(HEADER + "".join(f"a{i},8,1,100,20\n" for i in range(6)))
    return str(path)


def test_rows_go_to_a_file(fleet: str, tmp_path: Path) -> None:
    """CSV and Parquet hold the same rows, one for each point of the grid."""
    csv, parquet = tmp_path / "rows.csv", tmp_path / "rows.parquet"
    assert run(["sweep", fleet, *ARGUMENTS, "-o", str(csv)]) == 0
    assert run(["sweep", fleet, *ARGUMENTS, "-o", str(parquet)]) == 0
    frame = pl.read_parquet(parquet)
    assert len(frame) == 6
    assert pl.read_csv(csv, schema=frame.schema).equals(frame)


def test_table_names_max_pack(fleet: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says how far each server goes, and when the grid ended before it did."""
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["sweep", fleet, *ARGUMENTS[:-1]]) == 0
    shown = capsys.readouterr().out
    assert "Max_pack" in shown
    assert "6 (end of the grid)" in shown


def test_json_holds_rows_and_packs(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json a script gets the rows and the Max_pack of each curve."""
    assert run(["sweep", fleet, *ARGUMENTS, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert len(out["rows"]) == 6
    assert [pack["adapters"] for pack in out["max_pack"]] == [6, 6]


def test_a_range_of_slots_is_written_as_for_memory(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """LOW..HIGH, which `packer memory --max-loras` takes, is the same range here."""
    assert run(["sweep", fleet, "--adapters", "6", "--max-loras", "2..8", "--duration", "600", "--json"]) == 0
    assert [row["max_loras"] for row in json.loads(capsys.readouterr().out)["rows"]] == [2, 4, 8]


@pytest.mark.parametrize("suffix", ["html", "svg"])
def test_plot_is_written(fleet: str, tmp_path: Path, suffix: str) -> None:
    """--plot draws the curves with Max_pack marked."""
    path = tmp_path / f"curves.{suffix}"
    assert run(["sweep", fleet, *ARGUMENTS, "--plot", str(path)]) == 0
    assert "Max_pack" in path.read_text("utf-8")


def test_an_interrupt_keeps_what_is_there(
    fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C writes the rows that are simulated, which are those of a whole run."""
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    assert run(["sweep", fleet, *ARGUMENTS, "-o", str(whole)]) == 0
    row, simulated = twin_sweep.Sweep.row, []

    def interrupted(self: twin_sweep.Sweep, point: twin_sweep.Point) -> dict[str, object]:
        if len(simulated) == 3:
            raise KeyboardInterrupt
        simulated.append(point)
        return row(self, point)

    monkeypatch.setattr(twin_sweep.Sweep, "row", interrupted)
    assert run(["sweep", fleet, *ARGUMENTS, "--jobs", "1", "-o", str(parts)]) == 130
    assert "of 6 points" in capsys.readouterr().err
    lines = parts.read_text("utf-8").splitlines()
    assert 1 < len(lines) <= 4
    assert set(lines) <= set(whole.read_text("utf-8").splitlines())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--adapters", "2,x"], "whole numbers"),
        (["--adapters", "1:2"], "whole numbers"),
        (["--adapters", "1:9:0"], "whole numbers"),
        (["--adapters", "0"], "number of adapters"),
        (["--adapters", "1:10000:1", "--rate-factors", "1:100:1"], "100000 points"),
        (["--rate-factors", "-1"], "rate factor"),
        (["--rate-factors", "nan"], "rate factor"),
        (["--max-loras", ""], "whole numbers"),
        (["--max-lora-rank", "12"], "Expected --max-lora-rank to be one of"),
        (["--output", "rows.txt"], ".csv, .parquet"),
        (["--plot", "curve.pdf"], ".html, .png, .svg"),
        (["--output", "no/such/folder/rows.csv"], "no directory"),
    ],
)
def test_bad_options_are_told(fleet: str, extra: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nonsense on the command line costs exit code 2 and one message with the rule, before anything runs."""
    assert run(["sweep", fleet, "--quiet", *extra]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


def test_output_is_not_overwritten(fleet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that exists stays, unless --force is given."""
    path = tmp_path / "rows.csv"
    path.write_text("mine")
    assert run(["sweep", fleet, *ARGUMENTS, "-o", str(path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert run(["sweep", fleet, *ARGUMENTS, "-o", str(path), "--force"]) == 0
    assert path.read_text().startswith("adapters,")
