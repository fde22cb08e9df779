"""`packer schedule`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from packer.cli import run
from packer.io.plans import load_plan
from packer.io.recognise import kind_of
from packer.words import counted


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet of two hot adapters in the day and quiet nights."""
    monkeypatch.chdir(tmp_path)
    Path("fleet.csv").write_text("adapter,rank,rate\n" + "".join(f"a{i},8,1\n" for i in range(30)))
    rows = (f"a{i},0.02,3,3,0.02\n" for i in range(30))
    Path("day.csv").write_text("adapter,night,morning,noon,evening\n" + "".join(rows))


def test_a_day_becomes_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer servers at night, a static plan to deploy, and cron triggers for those that are off."""
    words = ["schedule", "fleet.csv", "--rates", "day.csv", "--period", "21600", "--margin", "0", "--price", "3"]
    files = ["--static", "plan.json", "--servers", "servers.json", "--keda", "keda.yaml"]
    assert run([*words, *files, "-o", "schedule.json"]) == 0
    assert kind_of("schedule.json") == "schedule"
    out = capsys.readouterr().out
    found = json.loads(Path("schedule.json").read_text())
    assert found["gpu_hours"] < found["static_gpu_hours"]
    assert found["price"] == pytest.approx(3.0 * found["gpu_hours"])
    assert found["static_price"] == 3.0 * found["static_gpu_hours"]
    assert f"takes {found['static_gpu_hours']:.1f} (${found['static_price']:.2f})," in out
    assert [period["periods"] for period in found["periods"]] == [["night"], ["morning", "noon"], ["evening"]]
    assert len(load_plan("plan.json").bins) == found["static_gpus"]
    servers = load_plan("servers.json").bins
    triggers = {
        each["metadata"]["name"]: each["spec"]["triggers"][0]["metadata"]
        for each in yaml.safe_load_all(Path("keda.yaml").read_text())
    }
    by_day = {each["server"] for each in found["periods"][1]["servers"]}
    by_night = {each["server"] for each in found["periods"][0]["servers"]}
    assert set(triggers) == {f"gpu-{k}" for k in by_day ^ by_night}
    assert all(triggers[f"gpu-{k}"]["end"] == "0 18 * * *" for k in by_day - by_night)
    for each in found["periods"]:
        for server in each["servers"]:
            deployed = servers[server["server"]]
            assert deployed.max_loras == server["max_loras"]
            assert deployed.profile.name == server["profile"]
            assert deployed.max_lora_rank == server["max_lora_rank"]
    pods = ["--adapters-claim", "adapters", "--token-secret", "hf", "-o", "k8s/"]
    assert run(["export", "servers.json", "--format", "k8s", *pods]) == 0
    manifests = "".join(path.read_text() for path in Path("k8s").iterdir())
    assert all(f"name: gpu-{k}\n" in manifests for k in range(len(servers)))
    assert f"the static plan of {counted(found['static_gpus'], 'GPU')} takes" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (("--rates", "day.csv", "--timezone", "UTC"), "--timezone needs --keda"),
        (("--rates", "day.csv", "--address", "UTC"), "--address needs --routes"),
        (("--rates", "day.csv", "--prefix", "a"), "--prefix needs --keda or --routes"),
        (("--trace", "t.csv", "--keda", "k.yaml", "--timezone", "Asia/Tokyo"), "--timezone needs --rates"),
    ],
)
def test_names_need_the_file_that_has_them(
    words: tuple[str, ...], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A time zone is of cron triggers, an address of routing tables: without them it would have no effect. Periods that
    are measured from a trace are in UTC, so that cron triggers in another zone would come hours too late."""
    assert run(["schedule", "fleet.csv", *words]) == 2
    assert needed in capsys.readouterr().err


def test_routes_of_each_period_name_its_servers() -> None:
    """Every period has tables for gateways: its adapters on its servers, called as all day, by its shares."""
    words = ["schedule", "fleet.csv", "--rates", "day.csv", "--period", "21600", "--margin", "0"]
    where = ["--routes", "routes", "--prefix", "llm", "--address", "10.0.0.1:{port}"]
    assert run([*words, *where, "-o", "schedule.json"]) == 0
    periods = json.loads(Path("schedule.json").read_text())["periods"]
    assert len({len(each["servers"]) for each in periods}) > 1
    written = {path.name for path in Path("routes").iterdir()}
    for each in periods:
        begin = f"{int(each['start_s'] / 3600):02d}00"
        names = {f"{begin}-{name}" for name in ("routing.json", "nginx.conf", "envoy.yaml", "litellm.yaml")}
        assert names <= written
        written -= names
        table = json.loads(Path(f"routes/{begin}-routing.json").read_text())
        ports = {server["server"]: 8000 + server["server"] for server in each["servers"]}
        assert table["servers"] == {f"llm-{k}": f"http://10.0.0.1:{port}" for k, port in ports.items()}
        for server in each["servers"]:
            for adapter, share in zip(server["adapters"], server["shares"], strict=True):
                places = {place["server"]: place["share"] for place in table["adapters"][adapter]}
                assert places[f"llm-{server['server']}"] == pytest.approx(share)
    assert not written
    assert run([*words, *where, "-o", "other.json"]) == 2  # the tables are there
    assert not Path("other.json").exists()


def test_a_day_may_begin_at_any_hour(capsys: pytest.CaptureFixture[str]) -> None:
    """Cron triggers, routing tables and the JSON follow the times of the columns, also where these pass midnight."""
    times = [f"{hour % 24:02d}:00" for hour in range(13, 37, 2)]
    rates = ["1.5" if time == "23:00" else "0.02" for time in times]
    rows = [["adapter", *times], *([f"a{i}", *rates] for i in range(30))]
    Path("day.csv").write_text("".join(",".join(row) + "\n" for row in rows))
    words = ["schedule", "fleet.csv", "--rates", "day.csv", "--margin", "0", "--startup", "120", "--replay"]
    assert run([*words, "--keda", "keda.yaml", "--routes", "routes", "-o", "schedule.json"]) == 0
    found = json.loads(Path("schedule.json").read_text())
    spans = [(each["start_s"] / 3600, each["end_s"] / 3600) for each in found["periods"]]
    assert spans == [(13.0, 23.0), (23.0, 25.0), (25.0, 37.0)]
    triggers = [each["spec"]["triggers"][0]["metadata"] for each in yaml.safe_load_all(Path("keda.yaml").read_text())]
    assert {(each["start"], each["end"]) for each in triggers} == {("58 22 * * *", "0 1 * * *")}
    assert {path.name[:4] for path in Path("routes").iterdir()} == {"1300", "2300", "0100"}
    assert found["replay"]["schedule"]["requests"] == found["replay"]["static"]["requests"] > 0
    assert "GPU-hours a day" in " ".join(capsys.readouterr().out.split())


def test_routes_of_more_than_a_day_have_names_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """After the first day hours go on counting, so that no period writes over another one; with --force the tables of a
    former schedule go, which a router would read at their hour, and nothing else does."""
    words = ["schedule", "fleet.csv", "--rates", "day.csv", "--period", "43200", "--margin", "0"]
    Path("routes/own").mkdir(parents=True)
    for name in ("1530-nginx.conf", "1530-own.conf"):
        Path("routes", name).write_text("former")
    assert run([*words, "--routes", "routes"]) == 2
    assert run([*words, "--routes", "routes", "--force"]) == 0
    tables = {path.name[:4] for path in Path("routes").iterdir()} - {"own"}
    assert tables == {"0000", "1200", "3600", "1530"}
    assert not Path("routes/1530-nginx.conf").exists()
    assert "removed routes/1530-nginx.conf" in capsys.readouterr().err


def test_all_files_are_written_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    """An address that two servers would share is known with the servers, before any file is written; one that is no
    address before the work."""
    words = ["schedule", "fleet.csv", "--rates", "day.csv", "--period", "21600", "--margin", "0", "--static", "a.json"]
    words += ["--servers", "b.json", "--keda", "keda.yaml", "--routes", "routes", "-o", "c.json"]
    before = {path.name for path in Path().iterdir()}
    assert run([*words, "--address", "host:80"]) == 2
    assert "servers differ, got 'host:80'" in " ".join(capsys.readouterr().err.split())
    assert {path.name for path in Path().iterdir()} == before
    assert run([*words[:3], "none.csv", *words[4:], "--address", "host"]) == 2
    assert "Expected an address like {name}:8000" in " ".join(capsys.readouterr().err.split())


def test_periods_are_shown_from_begin_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    """A period that a time of day names is shown up to the time at which it ends, others by their first and last name;
    a day on the servers of the static plan says that fewer would save nothing."""
    words = ["schedule", "fleet.csv", "--rates", "day.csv", "--margin", "0"]
    assert run([*words, "--period", "21600"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in ("night", "morning … noon", "evening"))
    day = Path("day.csv").read_text()
    Path("day.csv").write_text(day.replace("night,morning,noon,evening", "00:00,06:00,12:00,18:00"))
    assert run(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {span} " in out for span in ("00:00–06:00", "06:00–18:00", "18:00–24:00"))
    assert run([*words, "--slo", "none", "--startup", "86400"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "00:00–24:00" in out
    assert "GPU-hours a day on the static plan: fewer servers in quiet periods save nothing" in out


def test_servers_of_two_models_are_told_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server is shown with its profile if there are several."""
    monkeypatch.setenv("COLUMNS", "160")
    names = {"m": "h100-64gb/llama-3.1-8b-instruct", "n": "h100-64gb/qwen-2.5-7b-instruct"}
    models = {"m": "Llama-3.1-8B-Instruct", "n": "Qwen2.5-7B-Instruct"}
    Path("two.csv").write_text("adapter,rank,rate,model\n" + "".join(f"{k},8,1,{each}\n" for k, each in models.items()))
    Path("hours.csv").write_text("adapter,one,two\nm,1,1\nn,1,1\n")
    kinds = [word for name in names.values() for word in ("--profile", name)]
    assert run(["schedule", "two.csv", "--rates", "hours.csv", *kinds]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if "h100-64gb/" in line] == [
        [str(k), name] for k, name in enumerate(names.values())
    ]


def test_a_folder_is_made_when_its_tables_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that fails leaves no folder; one that can't be made is known before the work."""
    words = ["schedule", "fleet.csv", "--rates", "none.csv", "--routes"]
    assert run([*words, "new/routes"]) == 2
    assert not Path("new").exists()
    assert "none.csv" in capsys.readouterr().err
    for folder, why in (("day.csv/routes", "no directory"), ("n" * 300, "File name too long"), ("-", "a file")):
        assert run([*words, folder]) == 2
        assert why in capsys.readouterr().err


def test_a_period_of_another_length_than_the_columns_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns six hours apart are no periods of half an hour."""
    day = Path("day.csv").read_text()
    Path("day.csv").write_text(day.replace("night,morning,noon,evening", "06:00,12:00,18:00,00:00"))
    assert run(["schedule", "fleet.csv", "--rates", "day.csv", "--period", "1800"]) == 2
    assert "got '12:00' for the one that begins at 06:30" in " ".join(capsys.readouterr().err.split())


def test_the_replay_counts_requests_within_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """A limit that is given takes the place of the usual 100 ms."""
    Path("few.csv").write_text("adapter,rank,rate\na0,8,1\n")
    Path("hour.csv").write_text("adapter,one,two\na0,4,0.2\n")
    words = ["schedule", "few.csv", "--rates", "hour.csv", "--period", "600", "--replay"]
    shares = []
    for limit in ("mean_itl_ms=15", "mean_itl_ms=200"):
        assert run([*words, "--slo", limit, "-o", "o.json", "--force"]) == 0
        capsys.readouterr()
        shares.append(json.loads(Path("o.json").read_text())["replay"]["static"]["within_slo"])
    assert 0.5 < shares[0] < 0.95 < shares[1]


def test_rates_or_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """One of them, and not both."""
    assert run(["schedule", "fleet.csv"]) == 2
    assert run(["schedule", "fleet.csv", "--rates", "day.csv", "--trace", "day.csv"]) == 2
    assert capsys.readouterr().err.count("either --rates or --trace") == 2


def test_the_columns_times_are_the_period(capsys: pytest.CaptureFixture[str]) -> None:
    """Evenly spaced times of day say how long a period is; what other columns are taken for is said."""
    day = Path("day.csv").read_text()
    Path("day.csv").write_text(day.replace("night,morning,noon,evening", "00:00,06:00,12:00,18:00"))
    assert run(["schedule", "fleet.csv", "--rates", "day.csv", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["periods"][-1]["end_s"] == 86_400.0
    assert "--period" not in said.err
    Path("day.csv").write_text(day)
    assert run(["schedule", "fleet.csv", "--rates", "day.csv", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["periods"][-1]["end_s"] == 4 * 3600.0
    assert "each column of day.csv is taken as a period of 1 h" in said.err


def test_requests_that_servers_cut_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule whose servers cut the requests says so, in its first line, too, if they are many; one whose servers
    take them all says nothing."""
    given = ["schedule", "fleet.csv", "--rates", "day.csv", "--max-model-len"]
    for length, cut in (("512", True), ("65536", False)):
        assert run([*given, length]) == 0
        first, *rest = capsys.readouterr().out.splitlines()
        assert ("% of the requests cut to 512 tokens; " in first) is cut
        assert ("% of the requests have more than 512 tokens" in " ".join(" ".join(rest).split())) is cut


def test_rates_of_other_adapters_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A file with adapters that the fleet does not have is an error, not a smaller load, and names them."""
    with Path("day.csv").open("a") as file:
        file.write("new,1,1,1,1\n")
    given = ["--rates", "day.csv"], ["--loads", "day.csv", "--load", "noon"]
    objective = ["--objective", "headroom:rates=day.csv"]
    for command, options in (("schedule", given[0]), ("solve", given[1]), ("solve", objective)):
        assert run([command, "fleet.csv", *options]) == 2
        assert "rates for 1 adapter that the fleet does not have: 'new'" in capsys.readouterr().err


def test_a_trace_has_its_own_day(capsys: pytest.CaptureFixture[str]) -> None:
    """A fleet whose file has the requests needs no rates, and takes none."""
    rows = "".join(f"{5 * k},a{k % 2},8,300,20\n" for k in range(1500))
    Path("trace.csv").write_text("timestamp,adapter,rank,input_tokens,output_tokens\n" + rows)
    assert run(["schedule", "trace.csv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [name for each in found["periods"] for name in each["periods"]] == ["00:00", "01:00"]
    assert run(["schedule", "trace.csv", "--rates", "day.csv"]) == 2
    assert "neither --rates nor --trace" in capsys.readouterr().err


def test_a_day_of_metrics_becomes_a_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two days of Prometheus's counters, read at any time, give rates by the clock that a schedule follows."""
    day_s, window_s, queried = 86_400.0, 21_600.0, {}
    per_second = {"a0": (0.02, 3.0, 2.0, 0.0), "a1": (0.5, 0.5, 0.5, 0.5)}

    def answer(_url: str, parameters: dict[str, Any]) -> Any:
        queried.update(parameters)
        tokens = 100.0 if "tokens" in parameters["query"] else 1.0
        times = np.arange(parameters["start"], parameters["end"] + 1.0, parameters["step"])
        result = [
            {
                "metric": {"requested_model": name},
                "values": [[t, str(tokens * window_s * rates[int((t - window_s) % day_s // window_s)])] for t in times],
            }
            for name, rates in per_second.items()
        ]
        return {"status": "success", "data": {"resultType": "matrix", "result": result}}

    monkeypatch.setattr("packer.traces.prometheus._get", answer)
    words = ["workload", "from-metrics", "--url", "http://prometheus:9090", "--rank", "8", "--force"]
    words += ["--window", "21600", "--span", "172800", "--end", str(20_000 * day_s + 40_000.0)]
    assert run([*words, "--day", "measured.csv", "-o", "seen.csv"]) == 0
    assert queried["end"] == 20_000 * day_s + window_s
    lines = Path("measured.csv").read_text().splitlines()
    assert lines == ["adapter,00:00,06:00,12:00,18:00", "a0,0.02,3,2,0", "a1,0.5,0.5,0.5,0.5"]
    assert run(["schedule", "seen.csv", "--rates", "measured.csv", "--period", "21600", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.partition("{")[2].join(("{", "")))
    assert [name for each in found["periods"] for name in each["periods"]] == lines[0].split(",")[1:]


def test_days_that_cron_triggers_do_not_support_are_refused_before_planning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four periods of an hour are no day of 24 h: nothing is planned or written."""
    monkeypatch.setattr("packer.schedule", lambda *_args, **_more: pytest.fail("planned"))
    words = ["schedule", "fleet.csv", "--rates", "day.csv", "--keda", "keda.yaml", "--static", "plan.json"]
    assert run(words) == 2
    assert "a schedule of 24 h for cron triggers, got one of 4.0 h" in " ".join(capsys.readouterr().err.split())
    assert not Path("plan.json").exists()


def test_a_day_without_a_plan_could_not_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    """Too few GPUs end with 3, as for `packer solve`, and the number that would do as an option of this command."""
    words = ["schedule", "fleet.csv", "--rates", "day.csv", "--period", "21600", "--available", "1"]
    assert run(words) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "No plan holds in every period" in said
    assert "server 0" not in said
    assert "--available" in said
    assert "--gpus" not in said
