"""A goal that an idle server can't keep is found out at once, and said with what the server needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import packer
from packer import Adapter, Lengths, Workload
from packer.cli import run
from packer.plan import Status
from packer.planning.lone import lone_run, unreachable
from packer.planning.replicas import part
from packer.profile import Profile

KEYS = ("p95_ttft_ms", "mean_itl_ms", "p99_tpot_ms", "p90_e2e_ms", "server.median_ttft_ms", "p99_itl_ms")
FLEET = Workload(
    [
        Adapter("hot", 16, 1.4),
        Adapter("large", 64, 0.2),
        Adapter("cold", 16, 0.1, input_tokens=Lengths.constant(2000)),
    ]
)


@pytest.mark.parametrize("key", KEYS)
def test_limits_are_out_of_reach_below_what_an_idle_server_gives(server: Profile, key: str) -> None:
    """Just above the figure of requests that come one at a time a limit is in reach, just below it is not."""
    alone = lone_run(FLEET, part(FLEET, server, 0, 1), seed=0)
    assert alone.max_running == 1
    assert alone.completed >= 900
    figure = alone.figure(key.removeprefix("server."))
    for factor in (1.01, 0.99):
        fleet = FLEET.held_to({key: factor * figure})
        found = list(unreachable(lone_run(fleet, part(fleet, server, 0, 1), seed=0)))
        assert len(found) == (factor < 1.0)
        assert all("cannot be met: an idle server needs" in text for text in found)


def test_a_limit_of_requests_says_which_share_keeps_it(server: Profile) -> None:
    """Of a limit of each request the share within it on an idle server is given."""
    fleet = FLEET.held_to({"ttft_ms": 40.0})
    (text,) = unreachable(lone_run(fleet, part(fleet, server, 0, 1), seed=0))
    assert text.startswith("TTFT of a request 40 ms cannot be met for 99 % of the requests: an idle server keeps it")


@pytest.mark.parametrize(
    ("slo", "name", "words"),
    [
        ("mean_itl_ms=13", "hot", "mean ITL 13 ms cannot be met: an idle server needs 13."),
        ("p95_ttft_ms=70", "cold", "p95 TTFT 70 ms cannot be met: an idle server needs "),
        ("p95_e2e_ms=2000", "hot", "p95 latency 2 s cannot be met: an idle server needs "),
    ],
)
def test_the_plan_for_such_a_goal_is_small_and_says_why(server: Profile, slo: str, name: str, words: str) -> None:
    """Whatever adapter breaks a goal alone, no GPUs are added for it, and the reason names both times."""
    plan = packer.recommend(FLEET, server, slo=slo)
    assert plan.status is Status.INFEASIBLE
    assert plan.n_gpus <= 2
    assert plan.reasons[0].startswith(words)
    assert f"for adapter {name!r}, one request at a time" in plan.reasons[0]
    assert "No number of GPUs keeps it" in plan.decision


def test_a_goal_just_above_what_an_idle_server_gives_is_explained(server: Profile) -> None:
    """Adapters of large ranks get servers of their own, and the plan says why they carry so little."""
    fleet = Workload([Adapter("hot", 16, 0.5), Adapter("large", 64, 0.4), Adapter("next", 64, 0.35)])
    idle_ms = lone_run(fleet, part(fleet, server, 1, 1), seed=0).mean_itl_ms
    plan = packer.recommend(fleet, server, slo={"mean_itl_ms": 1.03 * idle_ms})
    assert plan.status is Status.FEASIBLE
    assert plan.n_gpus >= 3
    (reason,) = [each for each in plan.reasons if "leaves servers nearly idle" in each]
    assert f"an idle server needs {idle_ms:.1f} ms for adapter 'large', one request at a time" in reason
    wide = packer.recommend(fleet, server, slo={"mean_itl_ms": 2.0 * idle_ms})
    assert not any("nearly idle" in each for each in wide.reasons)


def test_the_command_ends_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json the exit code and the reason are the same."""
    monkeypatch.chdir(tmp_path)
    Path("small.csv").write_text("adapter,rank,rate\na,16,2.0\nb,16,0.6\nc,32,0.2\n")
    asked = ["solve", "small.csv", "--slo", "p95_ttft_ms=50,mean_itl_ms=14"]
    assert run(asked) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert run([*asked, "--json"]) == 3
    (reason, *_) = json.loads(capsys.readouterr().out)["reasons"]
    assert reason.startswith("mean ITL 14 ms cannot be met: an idle server needs 14.")
    assert reason in shown
