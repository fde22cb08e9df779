"""Predicted against measured, on the fake server."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from packer.adapter import Adapter
from packer.bin import Bin
from packer.cli import cli
from packer.errors import OutputError
from packer.evaluation import Evaluations
from packer.io.files import claimed
from packer.live.launch import Emulation, Launch
from packer.live.server import command_line
from packer.live.task import Endpoint
from packer.live.validate import COMPARED, Validation, ValidationSpec, difference
from packer.operate.real import figures_of, measure_plans
from packer.plan import Plan, Status
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.report.validation import validation_figure
from packer.settings import Settings
from packer.workload import Workload


@pytest.fixture
def bins(profile: Profile) -> list[Bin]:
    """Two servers with two adapters each."""
    return [Bin((0, 1), Settings(8, 8), profile), Bin((2, 3), Settings(8, 8), profile)]


@pytest.fixture
def make_plan(fleet: Workload, profile: Profile) -> Callable[[list[Bin]], Plan]:
    """A plan of given bins."""

    def make(bins: list[Bin]) -> Plan:
        found: Evaluations = TwinPredictor(seed=0).evaluate(fleet, bins)
        return Plan(fleet, tuple(bins), found, Status.FEASIBLE, "gpus", "greedy", "twin")

    return make


def test_missing_figures_have_no_difference() -> None:
    """What was not measured or not predicted is no error of 100 %."""
    assert difference(110.0, 90.0) == pytest.approx(20.0)
    assert difference(None, 1.0) is None
    assert difference(math.nan, 1.0) is None


def test_each_bin_is_measured_and_predicted(launch: Launch, fleet: Workload, bins: list[Bin], tmp_path: Path) -> None:
    """Two servers at once: the fake server agrees with its profile, and the figures are complete."""
    spec = ValidationSpec(duration_s=1.5, repeats=1, parallel=2)
    job = Validation(launch, fleet, bins, tmp_path, spec)
    reports = job.run()
    assert (job.differing, [r.index for r in reports]) == ([], [0, 1])
    for report in reports:
        assert report.failure is None
        assert report.starved == (False, False)
        assert report.memory_error == (False, False)
        error = report.errors["total_token_throughput"]
        assert error is not None
        assert error < 25.0
        data = json.loads(json.dumps(report.to_dict()))
        assert set(data["figures"]) == set(COMPARED)
        assert data["runs"][0]["completed"] > 10
    figure = validation_figure(reports, "t")
    titles = [panel.title for panel in figure.panels]
    assert "server 1: requests running" in titles


def test_requests_to_the_base_model_need_no_adapter(launch: Launch, profile: Profile, tmp_path: Path) -> None:
    """Adapters of rank 0 are requests to the base model, whatever they are called: none is loaded, LoRA may be off."""
    bins = [Bin((0, 1), Settings(1, 8), profile), Bin((0,), Settings(1, 8), profile)]
    fleet = Workload([Adapter("llama", 0, 10.0), Adapter("a=b,c", 8, 10.0)])
    launch = replace(launch, emulation=Emulation(1e6, 100.0))
    job = Validation(launch, fleet, bins, tmp_path, ValidationSpec(0.3))
    session = job.session(0)
    assert [name for name, _ in session.options.adapters] == ["a=b,c"]
    assert json.loads(command_line(launch, session.options, 1)[-3])["name"] == "a=b,c"  # name=path holds no =
    assert job._campaign(0, ()).job(Endpoint("http://x"), session.tasks[0]).models == ("base", "a=b,c")
    assert not re.search("lora", " ".join(command_line(launch, job.session(1).options, 1)))
    assert [job.session(k).options.kv_cache_bytes for k in (0, 1)] == [999_200, 1_000_000]


def test_repeats_show_repeatability(launch: Launch, fleet: Workload, bins: list[Bin], tmp_path: Path) -> None:
    """Two repeats with other seeds: both are kept and their difference is reported. Other settings than predicted are
    said in words; a default that is spelled out is no other setting."""
    further = {"prefix_caching": True, "async_scheduling": False, "lora_target_modules": ("q_proj", "v_proj")}
    other = replace(launch, engine=replace(launch.engine, max_num_seqs=9, **further))
    job = Validation(other, fleet, bins[:1], tmp_path, ValidationSpec(duration_s=0.5, repeats=2))
    modules = "lora_target_modules q_proj, v_proj instead of unset"
    scheduling = "async_scheduling off instead of on"  # prefix_caching on is the default
    assert job.differing == [scheduling, modules, "max_num_seqs 9 instead of 64"]  # not what is predicted
    reports = job.run()
    seeds = [run.outcome.task.seed for run in reports[0].runs]
    assert seeds == [0, 1]
    assert reports[0].repeatability["total_token_throughput"] is not None


def test_a_server_without_memory_is_a_result(
    with_fault: Callable[..., Launch], fleet: Workload, bins: list[Bin], tmp_path: Path
) -> None:
    """The result is a memory error with the server's words; figures are absent, nothing raises."""
    spec = ValidationSpec(duration_s=0.5)
    (report,) = Validation(with_fault("memory"), fleet, bins[:1], tmp_path, spec).run()
    assert report.memory_error == (False, True)
    assert report.starved[1] is True
    assert report.failure is not None
    assert report.mean("measured", "total_token_throughput") is None
    assert "No available memory" in report.to_dict()["log_tail"]
    assert validation_figure([report], "t").panels


def test_an_interrupt_while_the_server_starts_is_partial(
    with_fault: Callable[..., Launch], fleet: Workload, bins: list[Bin], tmp_path: Path
) -> None:
    """A server that was stopped before it was healthy has not failed: the report is marked as partial."""
    job = Validation(
        with_fault("slow-start"), fleet, bins[:1], tmp_path, ValidationSpec(duration_s=0.5),
        lambda what, _done, _total: job._stop.set() if "starting" in what else None,
    )  # fmt: skip
    (report,) = job.run()
    assert report.failure == "interrupted while the server started"
    assert report.interrupted
    assert not job.complete


def test_a_dead_server_leaves_a_partial_report(
    with_fault: Callable[..., Launch], fleet: Workload, bins: list[Bin], tmp_path: Path
) -> None:
    """What completed before the death is in the report, marked, with nothing said on starvation."""
    spec = ValidationSpec(duration_s=1.0)
    (report,) = Validation(with_fault("die:5"), fleet, bins[:1], tmp_path, spec).run()
    assert report.interrupted or report.failure
    assert report.starved[1] is None
    assert report.to_dict()["runs"][0]["completed"] >= 1


@pytest.mark.parametrize(("fault", "words"), [("hang:0", "hangs"), ("http500", "requests failed, mostly: HTTP 500")])
def test_a_server_that_serves_nothing_has_failed(
    fault: str, words: str, with_fault: Callable[..., Launch], fleet: Workload, bins: list[Bin], tmp_path: Path
) -> None:
    """A server without an answer is a failure in words, not a starved server, and it is measured again next time."""
    validation = Validation(with_fault(fault), fleet, bins[:1], tmp_path, ValidationSpec(duration_s=0.75))
    (report,) = validation.run()
    assert report.failure is not None
    assert words in report.failure
    assert report.starved[1] is None
    assert not list(tmp_path.rglob("done.json"))


def test_one_failing_bin_stops_no_other(
    with_fault: Callable[..., Launch], fleet: Workload, bins: list[Bin], tmp_path: Path
) -> None:
    """The refused adapter's requests fail on its own server only."""
    spec = ValidationSpec(duration_s=0.5)
    reports = Validation(with_fault("refuse:a2"), fleet, bins, tmp_path, spec).run()
    loads = [report.runs[0].outcome.load for report in reports]
    assert [bool(load.errors) for load in loads if load is not None] == [False, True]


def test_equal_bins_of_several_plans_are_measured_once(
    launch: Launch, fleet: Workload, bins: list[Bin], make_plan: Callable[[list[Bin]], Plan], tmp_path: Path
) -> None:
    """Two plans share a bin; three are measured, and each plan gets the sum of its own."""
    whole = Bin((0, 1, 2, 3), Settings(8, 8), bins[0].profile)
    plans = {"two": make_plan(bins), "half": make_plan(bins[:1]), "one": make_plan([whole])}
    measured = measure_plans(plans, fleet, launch, tmp_path, ValidationSpec(duration_s=0.5))
    assert {name: [report.index for report in reports] for name, reports in measured.items()} == {
        "two": [0, 1],
        "half": [0],
        "one": [2],
    }
    two, half = (figures_of(measured[name]) for name in ("two", "half"))
    assert not two[1]
    assert not two[0].memory_errors
    assert two[0].total_token_throughput > half[0].total_token_throughput
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 3
    again = measure_plans({"half": plans["half"]}, fleet, launch, tmp_path, ValidationSpec(duration_s=0.5))
    assert figures_of(again["half"]) == half


@pytest.fixture
def launch_file(launch: Launch, tmp_path: Path) -> Path:
    """The fake server as a launch file."""
    path = tmp_path / "launch.toml"
    command = json.dumps(list(launch.command))
    path.write_text(
        f'name = "fake"\nadapter_path = "{tmp_path}"\npython = {json.dumps(sys.executable)}\n'
        f"command = {command}\nstep_log = false\ntoken_ids = [4, 100]\n"
        '[model]\nname = "tiny"\npath = "none"\nweights_bytes = 1.0\nkv_bytes_per_token = 2048.0\n'
        'lora_bytes_per_rank = 17408.0\n[gpu]\nname = "none"\nmemory_bytes = 1e9\n'
        "[engine]\nmax_model_len = 256\nmax_num_batched_tokens = 512\nmax_num_seqs = 64\nblock_size = 32\n"
    )
    return path


def packer(*arguments: str | Path) -> subprocess.Popen[str]:
    """The command in a process of its own, which SIGINT reaches also where the tests run in the background."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from packer.cli import main; main()"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def invoked(*arguments: str | Path) -> Result:
    """The command in this process."""
    return CliRunner().invoke(cli, list(map(str, arguments)), standalone_mode=False)


def validation(folder: Path, launch_file: Path, server: int = 0, duration: str = "0.5s") -> list[str | Path]:
    """The words of a command that validates one server of the plan in this folder, with its results beside it."""
    return [
        "live", "validate", folder / "plan.json", "--launch", launch_file, "--duration", duration,
        "--bins", str(server), "--folder", folder / "work",
    ]  # fmt: skip


def test_the_command_writes_report_and_page(
    launch_file: Path, bins: list[Bin], make_plan: Callable[[list[Bin]], Plan], tmp_path: Path
) -> None:
    """`packer live validate` on a plan file: JSON, HTML and a table, exit code 0; with --quiet nothing is printed."""
    make_plan(bins).save(tmp_path / "plan.json")
    words = validation(tmp_path, launch_file)
    done = invoked(*words, "-o", tmp_path / "out.json", "--html", tmp_path / "out.html")
    assert (done.exit_code or done.return_value or 0) == 0, done.output
    assert "total_token_throughput" in done.stdout
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["complete"]
    assert data["gpus"][0]["memory_error"] == {"predicted": False, "measured": False}
    assert data["gpus"][0]["runs"][0]["failed"] == 0
    assert "<html" in (tmp_path / "out.html").read_text()[:2000].lower()
    assert data["calibrated"] is True
    again = invoked(*words, "--quiet")
    assert (again.output, again.return_value or 0) == ("", 0)


def test_the_second_server_of_a_plan_has_its_number(
    launch_file: Path, bins: list[Bin], make_plan: Callable[[list[Bin]], Plan], tmp_path: Path
) -> None:
    """--bins chooses servers of a plan, which keep their numbers in the report and in the folder of results."""
    make_plan(bins).save(tmp_path / "plan.json")
    done = invoked(*validation(tmp_path, launch_file, server=1), "-o", tmp_path / "out.json")
    assert "server 1: " in done.output
    assert [each["gpu"] for each in json.loads((tmp_path / "out.json").read_text())["gpus"]] == [1]
    assert (tmp_path / "work" / "gpu-1" / "repeat-0" / "done.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bins 7", "--bins: expected numbers from 0 to 1"),
        ("--bins -1 --bench result.json", "--bins: expected numbers from 0 to 1"),
        ("--gpus 0 --parallel 2", "--gpus: expected at least 2 devices for 2 servers at once"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    launch_file: Path, bins: list[Bin], make_plan: Callable[[list[Bin]], Plan], tmp_path: Path, words: str, message: str
) -> None:
    """Servers that the plan does not have, and too few GPUs for servers that run at once, are refused at first."""
    make_plan(bins).save(tmp_path / "plan.json")
    launch = () if "--bench" in words else ("--launch", launch_file)
    found = invoked("live", "validate", tmp_path / "plan.json", *launch, *words.split())
    assert isinstance(found.exception, click.UsageError)
    assert message in found.exception.message


def validated(fault: str, launch_file: Path, folder: Path) -> Result:
    """`live validate` of the first server of plan.json, with a fault; it writes out.json."""
    with launch_file.open("a") as file:
        file.write(f'[environment]\nFAKE_FAULT = "{fault}"\n')
    return invoked(*validation(folder, launch_file), "-o", folder / "out.json")


def test_failed_requests_are_shown_in_the_table(
    launch_file: Path, bins: list[Bin], make_plan: Callable[[list[Bin]], Plan], tmp_path: Path
) -> None:
    """Requests that one adapter's refusal failed are counted in the table and named below it."""
    make_plan(bins).save(tmp_path / "plan.json")
    text = validated("refuse:a1", launch_file, tmp_path).output
    named = re.search(r"server 0: (\d+) requests failed: HTTP 404: .*no model a1", text)
    assert named, text
    assert re.search(rf"failed requests\W+{named[1]}\b", text), text


def test_a_server_that_fails_every_request_is_exit_code_3(
    launch_file: Path, bins: list[Bin], make_plan: Callable[[list[Bin]], Plan], tmp_path: Path
) -> None:
    """Nothing was measured; the report is written all the same."""
    make_plan(bins).save(tmp_path / "plan.json")
    done = validated("http500", launch_file, tmp_path)
    assert (done.exit_code or done.return_value) == 3, done.output
    assert "requests failed" in json.loads((tmp_path / "out.json").read_text())["gpus"][0]["failure"]


@pytest.mark.parametrize("fault", ["no-metrics", "renamed"])
def test_figures_that_metrics_lack_are_explained(
    fault: str, launch_file: Path, bins: list[Bin], make_plan: Callable[[list[Bin]], Plan], tmp_path: Path
) -> None:
    """A figure without a measured value has its reason below the table and in the file."""
    make_plan(bins).save(tmp_path / "plan.json")
    text = validated(fault, launch_file, tmp_path).output
    why = "mean_running, mean_waiting, mean_kv_usage, preemptions have no value: 0 pages of /metrics had figures"
    assert f"server 0: {why}" in " ".join(text.split())
    assert why in json.loads((tmp_path / "out.json").read_text())["gpus"][0]["unmeasured"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(
    number: signal.Signals, launch_file: Path, bins: list[Bin], make_plan: Callable[[list[Bin]], Plan], tmp_path: Path
) -> None:
    """Ctrl-C as soon as the load begins: exit code 130, a report marked as partial, and no server left."""
    make_plan(bins).save(tmp_path / "plan.json")
    process = packer(*validation(tmp_path, launch_file, duration="60s"), "-o", tmp_path / "out.json")
    log = tmp_path / "work" / "gpu-0" / "repeat-0" / "client.log"
    while not log.exists() and process.poll() is None:
        time.sleep(0.1)
    port = port_of_server(launch_file.parent)
    process.send_signal(number)
    _text, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    data = json.loads((tmp_path / "out.json").read_text())
    assert not data["complete"]
    assert data["gpus"][0]["partial"]
    assert data["gpus"][0]["runs"][0]["ended"] == "interrupted"
    assert not [line for line in listening() if line.endswith(f":{port:04X}")]


def port_of_server(folder: Path) -> int:
    """Port of the running server whose adapters are below a folder, from its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().decode().split("\0")
            if "--lora-modules" in words and str(folder) in words[words.index("--lora-modules") + 1]:
                return int(words[words.index("--port") + 1])
    raise AssertionError("no server runs")


def listening() -> list[str]:
    """Local addresses of TCP sockets that listen, as in /proc/net/tcp."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A"]


def test_a_replaced_profile_predicts(
    launch: Launch, fleet: Workload, bins: list[Bin], profile: Profile, tmp_path: Path
) -> None:
    """The prediction follows the bin's profile: ten times slower steps, longer predicted gaps."""
    spec = ValidationSpec(duration_s=0.5)
    (fast,) = Validation(launch, fleet, bins[:1], tmp_path, spec).run()
    slow_bin = replace(bins[0], profile=profile.with_coefficients(base_ms=23.0))
    (slow,) = Validation(launch, fleet, [slow_bin], tmp_path, spec).run()
    first, second = (r.mean("predicted", "mean_itl_ms") for r in (fast, slow))
    assert first is not None
    assert second is not None
    assert np.isclose(second / first, 10.0, rtol=0.3)
    assert sorted(os.listdir(tmp_path)) == [".lock", "gpu-0"]


def test_one_folder_has_one_writer(launch: Launch, fleet: Workload, bins: list[Bin], tmp_path: Path) -> None:
    """A second command with the same folder is refused before it starts a server: results would be mixed."""
    with claimed(tmp_path), pytest.raises(OutputError, match="another process writes"):
        Validation(launch, fleet, bins[:1], tmp_path, ValidationSpec(duration_s=0.5)).run()
    assert os.listdir(tmp_path) == [".lock"]
