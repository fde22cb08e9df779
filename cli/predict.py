"""`packer predict`: what a predictor says of one server, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from packer.cli import options

if TYPE_CHECKING:
    from packer.bin import Bin
    from packer.evaluation import Evaluation
    from packer.predictors.learned import LearnedPredictor
    from packer.workload import Workload

MOST_INFLUENCES = 8


@click.command()
@options.workload_argument
@options.max_loras_option
@options.max_lora_rank_option
@options.profile_option
@options.predictor_option
@options.rate_factor_option
@click.option("--explain", is_flag=True, help="Say which rules fired, or which features mattered.")
@options.seed_option
@options.json_option
@options.quiet_option
def predict(
    workload_path: str,
    max_loras: int,
    max_lora_rank: int | None,
    profile_name: str,
    predictor: str,
    rate_factor: float,
    explain: bool,
    seed: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Judge one server that gets the whole workload.

    \b
    Example:
      packer predict fleet.csv --max-loras 32 --predictor boosting
      packer predict fleet.csv --max-loras 32 --predictor tree --explain
    """
    from dataclasses import asdict

    from packer.bin import Bin
    from packer.checks import slot_rank_for
    from packer.cli.output import note_estimated, print_json, show
    from packer.errors import IncompatibleError
    from packer.io.profiles import load_profile
    from packer.io.workloads import read_workload
    from packer.predictors.api import load_predictor
    from packer.predictors.auto import AutoPredictor
    from packer.predictors.learned import LearnedPredictor

    fleet = read_workload(workload_path)
    if rate_factor != 1.0:
        fleet = fleet.scaled(rate_factor)
    profile = load_profile(profile_name)
    note_estimated(profile, quiet=quiet)
    judge = load_predictor(predictor, profile, seed=seed)
    slot_rank = max_lora_rank if max_lora_rank is not None else slot_rank_for(int(fleet.ranks.max()))
    if int(fleet.ranks.max()) > slot_rank:
        raise IncompatibleError(
            f"--max-lora-rank {slot_rank} is smaller than the largest rank, {int(fleet.ranks.max())}."
        )
    server = Bin(tuple(range(len(fleet))), profile.settings(max_loras, slot_rank), profile)
    found = judge.evaluate(fleet, [server])[0]
    facts: dict[str, Any] = {
        "predictor": judge.name,
        "profile": profile.name,
        "calibrated": profile.calibrated,
        "max_loras": max_loras,
        "max_lora_rank": slot_rank,
        **asdict(found),
    }
    lines: list[str] = []
    learned = judge.learned if isinstance(judge, AutoPredictor) else judge
    if explain:
        if not isinstance(learned, LearnedPredictor):
            raise IncompatibleError(
                f"The predictor {judge.name!r} simulates: it has no rules or features to explain."
            )
        lines, facts["explanation"] = _explanation(learned, fleet, server, found)
    if isinstance(learned, LearnedPredictor):
        facts["outside"] = beyond = _outside(learned, fleet, server)
        lines += [f"Outside what {learned.name!r} learned from: {', '.join(beyond)}"] if beyond else []
    if isinstance(judge, AutoPredictor):
        lines.append(judge.summary())
        facts |= {"questions": judge.requested, "asked_twin": judge.left_to_twin}
    if as_json:
        print_json(facts)
        return
    if quiet:
        return
    show(_table(judge.name, found), f"Server: {profile.label}", *lines)


def _outside(judge: LearnedPredictor, fleet: Workload, server: Bin) -> list[str]:
    """Features of the server that lie outside what the predictor learned from, in words."""
    from packer.predictors.features import FEATURES

    features = judge.features(fleet, [server])
    beyond = judge.outside(features)[0]
    return [
        f"{each.text} {value:.4g}{' ' + each.unit if each.unit else ''}"
        for each, value, far in zip(FEATURES, features[0], beyond, strict=True)
        if far
    ]


def _table(name: str, found: Evaluation) -> Any:
    from packer.cli.output import number, table

    if found.memory_error:
        verdict = "memory error: the server does not start"
    else:
        verdict = f"{'starves' if found.starved else 'does not starve'} "
        verdict += f"(probability {found.starvation_probability:.1%})"
    rows = [
        ["verdict", verdict, ""],
        ["offered load", number(found.offered_tok_s), "tok/s"],
        ["throughput", number(found.total_token_throughput), "tok/s"],
        ["served share", number(100 * found.served_share), "%"],
        ["mean ITL", number(found.mean_itl_ms), "ms"],
        ["mean TTFT", number(found.mean_ttft_ms), "ms"],
        ["median TTFT", number(found.median_ttft_ms), "ms"],
        ["p99 TTFT", number(found.p99_ttft_ms), "ms"],
        ["KV cache", number(found.kv_cache_tokens, 0), "tokens"],
    ]
    return table(f"What the predictor {name!r} says", ["", "", "unit"], rows, left=(0, 2))


def _explanation(
    judge: LearnedPredictor, fleet: Any, server: Any, found: Evaluation
) -> tuple[list[str], dict[str, Any]]:
    """Lines for people, and the same as data."""
    from dataclasses import asdict

    from packer.predictors.explain import influences, rules_fired

    features = judge.features(fleet, [server])[0]
    if judge.model.kind == "tree":
        rules = rules_fired(judge, features)
        lines = ["", "Rules that fired:", *(f"  {name}: {rule}" for name, rule in rules.items())]
        return lines, {"rules": {name: str(rule) for name, rule in rules.items()}}
    rows = influences(judge, features, found.kv_cache_tokens)[:MOST_INFLUENCES]
    lines = ["", "Features that mattered (if each were that of a typical server):"]
    for row in rows:
        unit = f" {row.unit}" if row.unit else ""
        lines.append(
            f"  {row.text}: {row.value:.4g}{unit} instead of {row.typical:.4g} changes the probability of "
            f"starvation by {row.probability_change:+.1%}, the served share by {row.share_change:+.1%}"
        )
    return lines, {"features": [asdict(row) for row in rows]}
