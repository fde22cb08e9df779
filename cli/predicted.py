"""Output of `packer simulate --predictor`: the figures of a predictor, and the rules or features behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import packer
from packer.cli.options import Writing
from packer.cli.output import Table, figures, write_json
from packer.cli.traffic import refuse_unused
from packer.words import number

if TYPE_CHECKING:
    from packer.cli.simulate import ServerArguments, SimulationFiles
    from packer.operate.predict import Prediction


PREDICTED = (
    *("offered_tok_s", "total_token_throughput", "mean_itl_ms", "mean_ttft_ms", "median_ttft_ms"),
    *("p99_ttft_ms", "kv_cache_tokens"),
)
"""Predicted figures that are shown."""


def predicted(
    workload: packer.Workload, profile: packer.Profile, server: ServerArguments, seed: int,
    files: SimulationFiles, out: Writing,
) -> None:  # fmt: skip
    """Print the figures of a predictor instead of a simulation."""
    from packer.operate.predict import predict

    unused = (
        "duration_s", "seeds", "max_outstanding", "concurrency", "paced", "scrape_interval_s", "tables", "plot", "slo",
    )  # fmt: skip
    if server.predictor != "twin":  # else `predict` says that the twin has nothing to explain
        refuse_unused(f"--predictor {server.predictor}", unused)
    slots: dict[str, Any] = {"max_loras": server.max_loras, "max_lora_rank": server.max_lora_rank}
    found = predict(workload, profile, server.predictor, seed=seed, explain=server.explain, **slots)
    write_json(found.to_dict(), files.output)
    out.result(found.to_dict, lambda: _lines(found))


def _lines(found: Prediction) -> list[Table | str]:
    from packer.evaluation import FIGURES

    row = found.figures
    result = "memory error: the server does not start"
    if not row.memory_error:
        result = f"{'starves' if row.starved else 'does not starve'} (probability {row.starvation_probability:.1%})"
    rows = [["result", result, ""], ["served share", number(100 * row.served_share, 1), "%"]]
    rows += [[FIGURES[name].text, *figures(row, [name]), FIGURES[name].unit] for name in PREDICTED]
    outside = f"Outside what {found.predictor!r} was trained on: {', '.join(found.outside)}"
    title = f"One server by the predictor {found.predictor!r}"
    return [
        Table(title, ["", "", "unit"], rows, left=(0, 2)),
        f"Server: {found.server.profile.label}",
        *_why(found.explanation or {}),
        *([outside] if found.outside else []),
        *found.notes,
    ]


def _why(explanation: dict[str, Any]) -> list[str]:
    """The rules that fired, or the features that mattered."""
    if rules := explanation.get("rules"):
        return ["", "Rules that fired:", *(f"  {name}: {rule}" for name, rule in rules.items())]
    lines = [
        f"  {row['text']}: {row['value']:.4g}{' ' * bool(row['unit'])}{row['unit']} instead of {row['typical']:.4g} "
        f"changes the probability of starvation by {row['probability_change']:+.1%}, the served share by "
        f"{row['share_change']:+.1%}"
        for row in explanation.get("features", ())
    ]
    return ["", "Features that mattered (if each were that of a typical server):", *lines] if lines else []
