"""`packer evaluate` of a changed fleet from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from packer import Limits, Slo
from packer.cli import run
from packer.cli.evaluated import conclusion
from packer.io.plans import load_plan
from packer.lengths import Lengths
from packer.plan import Plan

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def plan_path(toy_plan: Callable[..., Plan], tmp_path: Path) -> str:
    """A plan file of four light adapters on two servers."""
    path = tmp_path / "plan.json"
    toy_plan(["a", "b", "c", "d"]).save(path)
    return str(path)


def test_evaluate_holds_and_breaks(plan_path: str, capsys: Capture) -> None:
    """A light plan holds at its rates and breaks at absurd ones, with exit code 3 and the GPU's number."""
    assert run(["evaluate", plan_path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True
    assert run(["evaluate", plan_path, "--rate-factor", "1000", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is False
    assert found["breaks_first"] in (0, 1)
    assert all(server["starved"] for server in found["servers"])


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_result_is_whole_on_any_terminal(
    plan_path: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Narrow terminals have fewer figures beside those of the plan, and no column is cut."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["evaluate", plan_path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    (head,) = [line for line in lines if line.startswith("  server")]
    assert head.split()[-2:] == ["headroom", "result"]
    assert head.count("(plan)") == {80: 2, 100: 3, 140: 5}[width]


def test_requests_that_servers_cut_and_columns_that_none_reads_are_named(
    toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture
) -> None:
    """A plan that holds only because servers cut the requests, or take priorities for none, says so."""
    plan = toy_plan(["a", "b"], gpus=1)
    a, b = plan.workload.adapters
    adapters = (replace(a, priority=1, input_tokens=Lengths.constant(100_000)), b)
    replace(plan, workload=replace(plan.workload, adapters=adapters)).save(tmp_path / "long.json")
    assert run(["evaluate", str(tmp_path / "long.json")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "% of the requests have more than " in out
    assert "Priorities have no effect:" in out


def test_a_changed_plan_is_evaluated_before_it_is_used(plan_path: str, capsys: Capture) -> None:
    """No command acts on a plan that was changed by hand; `evaluate --rewrite` makes it a plan again."""
    path = Path(plan_path)
    data = json.loads(path.read_text())
    data["gpus"][0]["max_loras"] += 1
    path.write_text(json.dumps(data))
    for words in (["evaluate", plan_path], ["export", plan_path], ["report", plan_path, "-o", "r.html"]):
        assert run(words) == 2
        assert "packer evaluate PLAN --rewrite" in capsys.readouterr().err
    assert run(["evaluate", plan_path, "--rewrite", "-q"]) == 0
    assert run(["export", plan_path]) == 0


def test_servers_and_adapters_are_added_by_hand(plan_path: str) -> None:
    """A plan with headroom and figures of adapters takes one more server, and an adapter, that have none of these."""
    path = Path(plan_path)
    assert run(["evaluate", plan_path, "--rewrite", "-q"]) == 0
    data = json.loads(path.read_text())
    assert data["adapters"]
    data["workload"]["adapters"].append({"name": "e", "rank": 8, "rate": 0.1})
    kept = {key: data["gpus"][0][key] for key in ("profile", "max_loras", "max_lora_rank")}
    data["gpus"].append({"gpu": len(data["gpus"]), **kept, "adapters": ["e"]})
    path.write_text(json.dumps(data))
    assert run(["show", plan_path]) == 2
    assert run(["evaluate", plan_path, "--rewrite", "-q"]) == 0
    again = load_plan(path)
    assert len(again.rooms) == again.n_gpus == len(data["gpus"])


def test_evaluate_adds_and_removes(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """Adapters come from a workload file and go by name; one that no slot can hold breaks the plan."""
    add = tmp_path / "add.csv"
    add.write_text("adapter,rank,rate\nnew,8,0.1\n")
    assert run(["evaluate", plan_path, "--add", str(add), "--remove", "a"]) == 0
    assert "The plan holds." in capsys.readouterr().out
    add.write_text("adapter,rank,rate\nhuge,64,0.1\n")
    assert run(["evaluate", plan_path, "--add", str(add)]) == 3
    assert "huge" in capsys.readouterr().out
    assert run(["evaluate", plan_path, "--remove", "nobody"]) == 2


def test_evaluate_names_what_has_no_place(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """Adapters without a server and GPUs that break are distinguished: servers that hold are not called broken."""
    add = tmp_path / "add.csv"
    add.write_text("adapter,rank,rate\nhuge,64,0.1\n")
    assert run(["evaluate", plan_path, "--add", str(add)]) == 3
    out = capsys.readouterr().out
    assert "The servers hold, but 1 adapter has no server." in out
    assert "breaks" not in out
    assert conclusion(2, 4, 0).startswith("The plan breaks: 2 of 4 servers. ")
    assert conclusion(1, 5, 0, 4).startswith("The plan breaks: 1 of 5 servers; 4 more break its latency limits. ")
    assert conclusion(0, 5, 1, 4).startswith("The plan breaks its latency limits, and 1 adapter has no server.")
    assert conclusion(2, 4, 3).startswith("The plan breaks: 2 of 4 servers, and 3 adapters have no server. ")


def test_evaluate_says_which_base_model_has_no_server(
    toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture
) -> None:
    """Adapters of a base model whose only server is lost wait for no larger slots; without any server no plan holds."""
    plan, path = toy_plan(["a", "b"]), str(tmp_path / "models.json")
    first, second = plan.bins
    other = replace(second.profile, model=replace(second.profile.model, name="other"))
    models = (first.profile.model.name, "other")
    fleet = replace(
        plan.workload, adapters=tuple(replace(a, model=m) for a, m in zip(plan.workload.adapters, models, strict=True))
    )
    replace(plan, workload=fleet, bins=(first, replace(second, profile=other))).save(path)
    assert run(["evaluate", path, "--lose-gpu", "1"]) == 3
    text = capsys.readouterr().out
    assert "No server of the base model other is left for: b." in text
    assert "slots large enough" not in text
    toy_plan(["a"], gpus=1).save(path)
    assert run(["evaluate", path, "--lose-gpu", "0"]) == 3
    assert "The plan does not hold without its 1 server: none is left." in capsys.readouterr().err


def test_a_lost_gpu_takes_its_server(toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture) -> None:
    """--lose-gpu counts servers, however many GPUs each has: the help and the message for a wrong number say so."""
    plan, path = toy_plan(["a", "b", "c"], gpus=3), str(tmp_path / "groups.json")
    (profile,) = {item.profile for item in plan.bins}
    group = replace(profile, engine=replace(profile.engine, tensor_parallel_size=4))
    groups = replace(plan, bins=tuple(replace(item, profile=group) for item in plan.bins))
    assert groups.n_gpus == 12
    groups.save(path)
    assert run(["evaluate", path, "--lose-gpu", "5"]) == 2
    assert "Expected lost servers among 0 to 2, got server 5." in capsys.readouterr().err
    assert run(["evaluate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--lose-gpu K A server to take away" in text


def test_evaluate_needs_a_server_that_is_used(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """Where every adapter goes and none finds a server, nothing is left to evaluate: that is said."""
    add = tmp_path / "add.csv"
    add.write_text("adapter,rank,rate\nhuge,64,0.1\n")
    words = [word for name in "abcd" for word in ("--remove", name)]
    assert run(["evaluate", plan_path, "--add", str(add), *words]) == 2
    assert "nothing to evaluate" in capsys.readouterr().err


def test_estimates_are_marked(plan_path: str, capsys: Capture) -> None:
    """A result that rests on an estimated profile says so in each form of output; quiet says nothing."""
    assert run(["evaluate", plan_path]) == 0
    out, err = capsys.readouterr()
    assert "estimated, not calibrated" in out
    assert "estimated, not calibrated" in err
    assert run(["evaluate", plan_path, "--json"]) == 0
    assert '"calibrated": false' in capsys.readouterr().out
    assert run(["evaluate", plan_path, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_plan_for_limits_breaks_with_them(toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture) -> None:
    """A plan that was made for latency limits of its own does not hold where they break, and says which they are."""
    path = tmp_path / "plan.json"
    for most, code in ((1e6, 0), (1e-3, 3)):
        made = replace(toy_plan(["a", "b"]), objective="slo", limits={"mean_ttft_ms": most})
        made.save(path)
        assert run(["evaluate", str(path)]) == code
        said = f"Latency limits (slo: mean_ttft_ms <= {most:g}) break on servers 0, 1."
        assert (said in capsys.readouterr().out) is (code == 3)
        path.unlink()


def test_limits_that_a_plan_was_not_made_for_are_named(
    toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture
) -> None:
    """A plan for the fewest GPUs holds where requests wait, and the result says that it is no promise of latency."""
    path = tmp_path / "plan.json"
    made = toy_plan(["a", "b"])
    fleet = replace(made.workload, slo=Slo(Limits(p95_ttft_ms=1e-3)))
    replace(made, workload=fleet).save(path)
    assert run(["evaluate", str(path)]) == 0
    assert "It was made for gpus, not for these limits." in capsys.readouterr().out


@pytest.mark.parametrize("with_", [["--router", "affinity"], ["--log", "access.jsonl"]])
def test_a_lost_gpu_is_refused_where_it_would_be_passed_over(plan_path: str, capsys: Capture, with_: list[str]) -> None:
    """Behind a router and with measured traffic the servers are those of the plan."""
    assert run(["evaluate", plan_path, "--lose-gpu", "0", *with_]) == 2
    assert "--lose-gpu has no effect with" in capsys.readouterr().err


def test_a_goal_that_the_predictor_does_not_judge_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """Trees say whether a server starves, not how long an adapter waits: "the plan holds" would not be about --slo."""
    fleet, path = tmp_path / "fleet.csv", str(tmp_path / "plan.json")
    fleet.write_text("adapter,rank,rate\na,8,0.5\n")
    assert run(["solve", str(fleet), "-o", path, "--no-verify", "--quiet"]) == 0
    words = ["evaluate", path, "--predictor", "tree"]
    assert run([*words, "--slo", "p95_ttft_ms=1"]) == 2
    assert "--slo has no effect with --predictor tree" in capsys.readouterr().err
    assert run([*words, "--slo", "none"]) == 0
    assert run(words) == 0
    assert "The latency limits are not evaluated, which the twin does" in capsys.readouterr().out
