"""The servers that commands plan with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from packer.cli import run
from packer.cli.output import Table
from packer.cli.plan_table import adapter_rows, plan_lines
from packer.io.plans import load_plan
from packer.io.profiles import load_profile, write_profile
from packer.plan import Plan
from packer.solvers.evaluator import rate_margin_for


@pytest.mark.parametrize(
    "words",
    [
        ["solve", "--no-verify", "--max-replicas", "1", "-o", "plan.json"],
        ["schedule", "--rates", "rates.csv", "-o", "day.json"],
    ],
)
def test_a_server_starts_with_the_largest_rank_of_the_fleet(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --tensor-parallel-size servers have as many GPUs as a slot of the fleet's largest rank needs."""
    monkeypatch.chdir(tmp_path)
    Path("fleet.csv").write_text("adapter,rank,rate\na,32,0.05\n")
    Path("rates.csv").write_text("adapter,00:00,12:00\na,0.02,0.05\n")
    command, *others = words
    assert run([command, "fleet.csv", "--gpu", "l4", "--model", "Qwen/Qwen3-32B", *others]) == 0
    assert capsys.readouterr().out.startswith("8 × L4 as 1 server of 8 ")


@pytest.mark.parametrize("confidence", [None, 0.8])
def test_each_kind_is_planned_with_its_own_margin(
    confidence: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind with a larger margin that is offered, too, in any order, does not raise the rates of the kind taken."""
    monkeypatch.chdir(tmp_path)
    taken = load_profile("h100-64gb/llama-3.1-8b-instruct")
    taken = replace(taken, gpu=replace(taken.gpu, price_per_hour=1.0))
    rough = replace(
        taken,
        name="rough/llama",
        gpu=replace(taken.gpu, name="other GPU", price_per_hour=2.0),
        errors={name: error + 0.5 for name, error in taken.errors.items()},
    )
    write_profile(taken, "taken.toml")
    write_profile(rough, "rough.toml")
    Path("fleet.csv").write_text("adapter,rank,rate\na,8,5\nb,16,5\n")
    words = ["solve", "fleet.csv", "--no-verify", *([] if confidence is None else ["--confidence", str(confidence)])]
    margins = []
    for names in (["taken"], ["taken", "rough"], ["rough", "taken"]):
        offered = [word for name in names for word in ("--profile", f"{name}.toml")]
        assert run([*words, *offered, "-o", "plan.json", "--force"]) == 0
        plan = load_plan("plan.json")
        assert {item.profile.name for item in plan.bins} == {taken.name}
        margins.append(plan.margin)
    assert margins == [rate_margin_for(taken, confidence=confidence)] * 3


def test_gpus_without_a_price_get_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several settings of one GPU that is not commonly rented are compared by GPUs; no price is invented."""
    monkeypatch.chdir(tmp_path)
    Path("fleet.csv").write_text("adapter,rank,rate\na,8,0.05\n")
    words = ["--gpu", "mi300x", "--model", "Qwen/Qwen3-0.6B", "--max-num-seqs", "16,32", "--no-verify"]
    assert run(["solve", "fleet.csv", *words, "--max-model-len", "4096", "-o", "plan.json"]) == 0
    plan = load_plan("plan.json")
    assert (plan.price_per_hour, plan.n_gpus) == (None, 1)
    assert "per hour" not in plan.decision


def test_a_bound_on_cost_is_a_price(toy_plan: Callable[..., Plan]) -> None:
    """The cheapest plan and what no plan is cheaper than are said in the same unit."""
    plan = replace(toy_plan(("a", "b"), gpus=1), objective="cost", objective_value=(3.8,), lower_bound=2.72966)
    status = next(line for line in plan_lines(plan) if str(line).startswith("Status"))
    assert "; $3.80 per hour, at least $2.73" in str(status)


def test_servers_of_profiles_of_one_name_are_told_apart(toy_plan: Callable[..., Plan]) -> None:
    """The table of a plan says which server is of which profile, also where both have the same name."""
    plan = toy_plan(("a", "b"))
    one, other = plan.bins
    dear = replace(other.profile, gpu=replace(other.profile.gpu, price_per_hour=9.0))
    table = next(
        each for each in plan_lines(replace(plan, bins=(one, replace(other, profile=dear)))) if isinstance(each, Table)
    )
    assert [row[1] for row in table.rows] == [one.profile.name, f"{one.profile.name} (2)"]


def test_adapters_share_the_price_of_their_servers(toy_plan: Callable[..., Plan]) -> None:
    """Prices of adapters add up to that of the plan, by their load on each server; without one there is none."""
    plan = toy_plan(("a", "b", "c"), replicated=True)
    dear, free = (
        [
            replace(each, profile=replace(each.profile, gpu=replace(each.profile.gpu, price_per_hour=price)))
            for each, price in zip(plan.bins, prices, strict=True)
        ]
        for prices in ((2.0, 4.0), (None, 4.0))
    )
    prices = [row["price_per_hour"] for row in adapter_rows(replace(plan, bins=tuple(dear)), "abc")]
    _, b, c = plan.workload.rates
    on_first, on_second = plan.bins[0].rates(plan.workload), plan.bins[1].rates(plan.workload)
    assert sum(prices) == pytest.approx(6.0)
    assert prices[2] == pytest.approx(2.0 * c / on_first.sum())
    assert prices[1] == pytest.approx(4.0 * b / on_second.sum())
    assert adapter_rows(replace(plan, bins=tuple(free)), "a")[0]["price_per_hour"] is None
