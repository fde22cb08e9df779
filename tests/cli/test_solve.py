"""`packer solve`, `evaluate` and `compare` from the command line."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from packer.bin import Bin
from packer.cli import run
from packer.cli.compare import split_names
from packer.cli.output import interruptible
from packer.errors import OutputError
from packer.evaluation import Evaluations
from packer.goal import Goal
from packer.io.plans import load_plan
from packer.io.profiles import write_profile
from packer.io.workloads import read_workload
from packer.plan import Plan, Status
from packer.planning.compare import PlanFigures
from packer.predictors.api import load_predictor
from packer.profile import Profile
from packer.solvers.replan import objective_of
from packer.strategies import Predictor
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a wide page and a predictor that takes no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def analytic(predictor: str, profile: Profile, *, seed: int) -> Predictor:
        replaced = predictor in ("twin", "auto")
        return AnalyticPredictor() if replaced else load_predictor(predictor, profile, seed=seed)

    monkeypatch.setattr("packer.solvers.evaluator.load_predictor", analytic)
    write_profile(small_profile(), "small.toml")
    return tmp_path


def fleet(name: str = "fleet.csv", n: int = 60, rate: float = 0.3) -> str:
    """A workload file."""
    rows = [f"a{i},{8 if i % 3 else 32},{rate}" for i in range(n)]
    Path(name).write_text("\n".join(["adapter,rank,rate", *rows]) + "\n")
    return name


def packer(*words: str) -> int:
    """Run the command line with the small profile, without the twin's verification."""
    server = [] if words[0] == "evaluate" or "--from" in words else ["--profile", "small.toml"]
    quick = ["--no-verify"] if words[0] == "solve" else []
    if words[0] == "solve" and not {"--objective", "--from"} & set(words):
        quick += ["--objective", "gpus"]
    return run([*words, *server, *quick])


def test_a_plan_is_printed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a row per GPU with slots, loads, latencies and headroom, then totals and status."""
    assert packer("solve", fleet()) == 0
    out = capsys.readouterr()
    plan = load_plan("plan.json")
    assert plan.status is not Status.INFEASIBLE
    for words in ("max_loras × rank", "TTFT ms", "ITL ms", "headroom", "×r32", "needed"):
        assert words in out.out
    assert f"60 adapters, {plan.n_gpus} GPU" in out.out
    assert "wrote plan.json" in out.err
    room = plan.headroom
    assert len(room) == plan.n_gpus


def test_the_second_run_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """An earlier plan in plan.json is replaced; one that was changed by hand is refused before the search."""
    assert packer("solve", fleet(rate=0.2)) == 0
    assert packer("solve", fleet()) == 0
    assert "wrote plan.json" in capsys.readouterr().err
    assert load_plan("plan.json").workload.rates.tolist() == [0.3] * 60
    changed = Path("plan.json").read_text("utf-8").replace('"a7"', '"b7"')
    Path("plan.json").write_text(changed, "utf-8")
    assert packer("solve", "fleet.csv") == 2
    out, err = capsys.readouterr()
    assert "Plan for" not in out
    assert "plan.json: the file exists; --force overwrites it" in err
    assert Path("plan.json").read_text("utf-8") == changed
    assert packer("solve", "fleet.csv", "--from", "plan.json") == 2
    assert packer("solve", "fleet.csv", "--force") == 0
    assert packer("solve", "fleet.csv", "-o", "other.json") == 0


def test_a_plan_that_can_not_be_written_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that became full during the search costs the file, not the plan."""

    def full(*_given: object, **_more: object) -> None:
        raise OutputError("plan.json: can't be written: no space left on device.")

    monkeypatch.setattr("packer.io.plans.write_plan", full)
    assert packer("solve", fleet()) == 2
    out, err = capsys.readouterr()
    assert "60 adapters" in out
    assert "no space left" in err
    assert "wrote" not in err


def test_json_goes_to_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the plan is printed as in its file, and no file is written unless named."""
    assert packer("solve", fleet(), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["n_gpus"] == len(data["gpus"])
    assert not Path("plan.json").exists()


def test_same_seed_same_bytes() -> None:
    """Two runs write the same file but for the run time."""
    for name in ("a.json", "b.json"):
        assert packer("solve", fleet(), "-q", "-o", name) == 0
    one, other = (json.loads(Path(name).read_text()) for name in ("a.json", "b.json"))
    del one["runtime_s"], other["runtime_s"]
    assert one == other


def test_infeasible_is_exit_code_3_with_names_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """More load than --gpus allows: exit code 3, which adapters, what would help; no plan.json is left, it says."""
    assert packer("solve", fleet(), "--gpus", "1") == 3
    out, err = capsys.readouterr()
    assert "plan.json is not written" in err
    assert "infeasible" in out
    assert "can't hold adapters 'a" in out
    assert "What would help: --gpus" in out
    assert not Path("plan.json").exists()
    assert packer("solve", "fleet.csv", "--gpus", "1", "-o", "part.json") == 3
    assert load_plan("part.json").unplaced


def test_a_hot_adapter_is_named_and_split_if_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter that starves an empty GPU alone is named; --max-replicas splits it."""
    Path("hot.csv").write_text("adapter,rank,rate\nhot,8,20\ncool,8,0.1\n")
    assert packer("solve", "hot.csv") == 3
    assert "'hot'" in capsys.readouterr().out
    assert packer("solve", "hot.csv", "--max-replicas", "8") == 0
    assert "(1×shared)" in capsys.readouterr().out


def test_a_plan_without_servers_names_no_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """The line on the default profile names one, so a plan without servers has no such line."""
    Path("hot.csv").write_text("adapter,rank,rate\nhot,8,1000\n")
    assert run(["solve", "hot.csv", "--objective", "gpus", "--no-verify"]) == 3
    out = capsys.readouterr().out
    assert "'hot'" in out
    assert "the default:" not in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--objective", "gpu"], "Did you mean 'gpus'"),
        (["--solver", "gredy"], "Did you mean 'greedy'"),
        (["--predictor", "twinn"], "Unknown predictor"),
        (["--gpus", "0"], "--gpus"),
        (["--objective", "latency"], "--gpus"),
        (["--objective", "gpus", "--min-gpus", "2"], "--min-gpus goes without an objective"),
        (["--objective", "latency", "--gpus", "2", "--solver", "greedy"], "take the solver spread"),
        (["--objective", "slo"], "gives no slo_used"),
        (["--margin", "0.1", "--confidence", "0.9"], "both"),
        (["-o", "no/such/dir/plan.json"], "no directory"),
        (["--time-limit", "0"], "--time-limit"),
    ],
)
def test_wrong_choices_end_with_exit_code_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong or unfit choices: exit code 2, a message with the rule, nothing written."""
    assert packer("solve", fleet(), *words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert not Path("plan.json").exists()


def test_spreading_over_given_gpus_needs_no_solver(capsys: pytest.CaptureFixture[str]) -> None:
    """`--objective latency --gpus N` alone spreads over N GPUs."""
    assert packer("solve", fleet(n=24), "--objective", "latency", "--gpus", "4") == 0
    plan = load_plan("plan.json")
    assert (plan.n_gpus, plan.solver) == (4, "spread-refined")


def test_prices_choose_the_gpu_type(capsys: pytest.CaptureFixture[str]) -> None:
    """With two GPU types of the same power the plan takes the cheaper one, by the prices given."""
    write_profile(small_profile("second/test-model", None), "second.toml")
    words = ["solve", fleet(), "--objective", "cost", "--profile", "second.toml"]
    assert packer(*words) == 2
    assert "price_per_hour" in capsys.readouterr().err
    assert packer(*words, "--price", "second.toml=0.5") == 0
    plan = load_plan("plan.json")
    assert {item.profile.name for item in plan.bins} == {"second/test-model"}
    assert plan.objective_value[0] == 0.5 * plan.n_gpus
    for wrong in ("second.toml", "third.toml=1", "second.toml=free", "second.toml=-1"):
        assert packer(*words, "--force", "--price", wrong) == 2
        assert "--price: expected PROFILE=PRICE" in capsys.readouterr().err


class Interrupting(AnalyticPredictor):
    """Presses Ctrl-C at the first query."""

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Evaluate, after SIGINT."""
        if not PRESSED:
            PRESSED.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return super().evaluate(workload, bins)


PRESSED: list[bool] = []


def test_ctrl_c_saves_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in the middle: a whole, valid plan is saved, and the exit code is 130."""
    PRESSED.clear()
    monkeypatch.setattr("packer.solvers.evaluator.load_predictor", lambda *_, **__: Interrupting())
    assert packer("solve", fleet()) == 130
    plan = load_plan("plan.json")
    assert plan.interrupted
    assert plan.unplaced == ()
    assert plan.evaluations.feasible.all()
    assert "best plan so far" in capsys.readouterr().err


def test_a_second_ctrl_c_aborts() -> None:
    """The first Ctrl-C requests the end, the second one raises; afterwards Ctrl-C is what it was."""
    before = signal.getsignal(signal.SIGINT)
    answers: list[bool] = []

    def press_twice() -> None:
        with interruptible() as stop:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(0.2)
                answers.append(stop())

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert answers == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_evaluate_judges_again(capsys: pytest.CaptureFixture[str]) -> None:
    """At the plan's load every GPU holds; with three times the load it says which ones don't, exit code 3."""
    assert packer("solve", fleet(), "-q") == 0
    assert packer("evaluate", "plan.json") == 0
    assert "The plan holds." in capsys.readouterr().out
    assert packer("evaluate", "plan.json", "--rate-factor", "3", "-o", "hot.json") == 3
    assert "starved" in capsys.readouterr().out
    assert load_plan("hot.json").status is Status.INFEASIBLE


def test_evaluate_refuses_a_duration_without_the_twin(capsys: pytest.CaptureFixture[str]) -> None:
    """Only a simulation has a duration."""
    assert packer("solve", fleet(), "-q") == 0
    assert packer("evaluate", "plan.json", "--duration", "60") == 2
    assert "needs the predictor 'twin'" in capsys.readouterr().err


def test_from_follows_the_new_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    """A changed fleet, also one with none of its adapters: who moves, is new and gone is said, and the plan written."""
    assert packer("solve", fleet(), "-q") == 0
    text = Path("fleet.csv").read_text().splitlines()
    Path("new.csv").write_text("\n".join([*text[:-5], "extra,8,0.1"]) + "\n")
    assert packer("solve", "new.csv", "--from", "plan.json", "-o", "next.json") == 0
    out = capsys.readouterr().out
    assert "0 adapters moved, 1 new, 5 gone" in out
    new = load_plan("next.json")
    assert new.objective == "moves"
    assert new.objective_value[1] == 0.0
    Path("new.csv").write_text("adapter,rank,rate\nextra,8,0.1\n")
    assert packer("solve", "new.csv", "--from", "plan.json", "-o", "other.json") == 0
    assert "0 adapters moved, 1 new" in capsys.readouterr().out
    assert packer("solve", "new.csv", "--from", "plan.json", "--solver", "replan") == 2
    assert "a running plan of this fleet" in capsys.readouterr().err


def test_from_keeps_the_limits_of_the_running_plan() -> None:
    """A fleet that changes is still held to its latency limits, which its new workload file does not carry."""
    limited = ["--objective", "slo:mean_itl_ms=12.5", "--slo", "mean_ttft_ms=700"]
    assert packer("solve", fleet(), *limited) == 0
    assert packer("solve", fleet(), "--from", "plan.json", "-o", "next.json") == 0
    assert packer("solve", fleet(), "--from", "plan.json", "--objective", "gpus", "-o", "fewest.json") == 0
    old, new, fewest = (load_plan(f"{name}.json") for name in ("plan", "next", "fewest"))
    assert old.workload.slo == Goal.only({"mean_ttft_ms": 700.0, "mean_itl_ms": 12.5})
    assert (new.limits, new.workload.slo) == (old.limits, old.workload.slo)
    assert new.evaluations.mean_itl_ms.max() <= 12.5 < fewest.evaluations.mean_itl_ms.max()
    assert objective_of(replace(old, objective="recommend")) == "slo"


def test_compare_shows_every_outcome(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination has its row, failing ones with what is wrong; rows and plot are written."""
    monkeypatch.setattr("packer.planning.compare.TwinPredictor", lambda seed: AnalyticPredictor())
    names = ["--solvers", "greedy,maxbase,spread", "--objectives", "gpus,latency"]
    assert packer("compare", fleet(), *names, "-o", "rows.csv", "--plot", "plot.svg") == 0
    out = capsys.readouterr().out
    assert "starved" in out
    rows = list(csv.DictReader(Path("rows.csv").read_text().splitlines()))
    outcomes = {(row["solver"], row["objective"]): row["outcome"] for row in rows}
    assert len(outcomes) == 6
    assert outcomes["greedy", "gpus"] == "ok"
    assert outcomes["maxbase", "gpus"].startswith("starved on")
    assert outcomes["greedy", "latency"] == "ok"
    assert outcomes["spread", "latency"] == "ok"
    assert Path("plot.svg").read_text().startswith("<?xml")


def test_compare_sweeps_over_sizes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With --sweep adapters=… there is a row for each size, and the plot has curves."""
    monkeypatch.setattr("packer.planning.compare.TwinPredictor", lambda seed: AnalyticPredictor())
    sweep = ["--sweep", "adapters=20:80:20", "--solvers", "greedy,greedy-paper"]
    assert packer("compare", fleet(), *sweep, "--json", "--plot", "plot.html") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["adapters"] for row in rows] == [n for n in (20, 40, 60, 80) for _ in range(2)]
    gpus = {(row["solver"], row["adapters"]): row["gpus"] for row in rows}
    assert all(gpus["greedy", n] <= gpus["greedy-paper", n] for n in (20, 40, 60, 80))
    assert "greedy-paper" in Path("plot.html").read_text()


def test_compare_by_real_servers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With --launch the figures and outcomes are the real servers'."""
    monkeypatch.setattr("packer.planning.compare.TwinPredictor", lambda seed: AnalyticPredictor())
    monkeypatch.setattr("packer.live.launch.read_launch", lambda path: path)

    def measure(plans: dict[str, Plan], *_: object) -> dict[str, str]:
        return {name: plan.solver for name, plan in plans.items()}

    def figures(solver: str) -> tuple[PlanFigures, tuple[str, ...]]:
        starved = PlanFigures("vllm", 99.0, math.nan, math.nan, 1, 0)
        return starved if solver == "maxbase" else PlanFigures("vllm", 111.0, 22.0, 3.0, 0, 0), ()

    monkeypatch.setattr("packer.operate.real.measure_plans", measure)
    monkeypatch.setattr("packer.operate.real.figures_of", figures)
    names = ["--solvers", "greedy,maxbase", "--launch", "launch.toml"]
    assert packer("compare", fleet(), *names, "--json") == 0
    rows = {row["solver"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [rows["greedy"][f"reference{key}"] for key in ("", "_total_token_throughput")] == ["vllm", 111.0]
    assert rows["maxbase"]["outcome"] == "starved on 1"
    assert rows["maxbase"]["reference_mean_ttft_ms"] is None


@pytest.mark.parametrize(
    "words",
    [
        ["--sweep", "rates=1,2"],
        ["--sweep", "adapters=0"],
        ["--solvers", "greedy,nobody"],
        ["--objectives", "gpus:x=1"],
        ["-o", "rows.txt"],
        ["--plot", "plot.gif"],
        ["--launch", "missing.toml"],
    ],
)
def test_compare_refuses_what_it_can_not_do(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options are refused before anything runs, with exit code 2."""
    assert packer("compare", fleet(), *words) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpus", ["gpus"]),
        ("gpus,cost", ["gpus", "cost"]),
        ("slo:mean_ttft_ms=5,p99_itl_ms=6,gpus", ["slo:mean_ttft_ms=5,p99_itl_ms=6", "gpus"]),
        ("gpus,,slo:mean_itl_ms=1", ["gpus", "slo:mean_itl_ms=1"]),
    ],
)
def test_parameters_stay_with_their_objective(text: str, names: list[str]) -> None:
    """A list of objectives with parameters is split where a new name starts."""
    assert split_names(text) == names


def test_a_changed_fleet_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--rate-factor` and `--add` plan for the fleet that will be, without a file of it."""
    more = tmp_path / "more.csv"
    more.write_text("adapter,rank,rate,slo_class\nnew,8,0.1,chat\n")
    words = ["--objective", "gpus", "--predictor", "twin", "--no-verify"]
    path = tmp_path / "plan.json"
    changed = ["--rate-factor", "2", "--add", str(more), "-o", str(path)]
    assert packer("solve", fleet(), *words, *changed) == 0
    before, after = read_workload(fleet()), load_plan(str(path)).workload
    assert after.names == (*before.names, "new")
    assert after.rates.sum() == pytest.approx(2.0 * (before.rates.sum() + 0.1))
    for add, said in ((fleet(), "which the fleet has already"), (str(more), "no slo_used for the limits")):
        assert packer("solve", fleet(), *words, "--add", add, "--slo", "chat:p95_ttft_ms=300") == 2
        assert said in capsys.readouterr().err
