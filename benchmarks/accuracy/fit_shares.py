"""Fit the shares of `fit/shares.toml` to the public rows, and say the errors with servers, GPUs and models left out.

uv run python benchmarks/accuracy/fit_shares.py [--simulated] [--write]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rows import Server, proxy_tpot_ms, servers
from run import simulated_tpot_ms
from scipy.optimize import least_squares

from packer.arrays import FloatArray
from packer.fit import roofline

START = {
    "step_ms": 1.5, "layer_ms": 0.012, "launch_ms": 0.0045, "launch_fp8_ms": 0.0045, "read_16": 0.87, "read_8": 0.78,
    "read_4": 0.65, "multiply_16": 0.68, "multiply_8": 0.5, "multiply_4": 0.4, "link": 0.5, "request_ms": 0.03,
    "prefill_step_ms": 0.5, "read_kv_16": 0.8, "read_kv_8": 0.65, "read_kv_8_new": 1.0, "read_kv_compressed": 0.7,
    "attend": 0.4,
}  # fmt: skip
"""Where the fit begins and to which it is held: kernel tables for the shares, steps of small models for the times."""

EXPERTS = {
    "step_ms": 0.5, "routing": 0.9, "expert_layer_ms": 0.03, "launch_fp8_ms": 0.02,
    "read_experts_8": 0.7, "read_experts_4": 0.6, "read_experts_16": 0.7,
    "read_experts_mxfp4_old": 0.7, "read_experts_mxfp4_new": 1.0, "read_experts_int4_old": 0.5,
    "read_experts_int4_new": 0.35, "multiply_experts_8": 0.35,
    "multiply_experts_4": 0.25, "multiply_experts_16": 0.5, "multiply_experts_mxfp4_old": 0.4,
    "multiply_experts_mxfp4_new": 0.5, "multiply_experts_int4_old": 0.4, "multiply_experts_int4_new": 0.4,
}  # fmt: skip
"""The same of mixtures of experts. Their rows are of vLLM 0.15 to 0.19, whose steps are scheduled while the one before
runs (asynchronous scheduling, the default since 0.14): of the host's work before each step most is hidden. All dense
rows are older."""
FIXED = {"reduce_ms": 0.0038, "reduce_gpu_ms": 0.00095, "reduce_pcie": 3.0}
"""All-reduces of a few tokens, from the kernel tables: 4.7, 5.7 and 6.6 µs among 2, 4 and 8 GPUs."""

COMPARED = 6
"""Rows of a server in which the twin is compared with `proxy_tpot_ms`."""

RUNS, DRAWS = 3, 8
"""Rows of a server whose level is measured, and how often they are drawn."""

ROWS = 15
"""Rows of a server that `--simulated` takes at most."""

HELD = {"dense": 0.3, "experts": 0.6}
"""Weight of staying at the start: log of the factor, against log errors of rows. With more for mixtures of experts,
models that are left out come out nearer: 0.3, 0.6, 1 and 2 were tried."""


def start_of(kind: str) -> dict[str, float]:
    """Where the fit of "dense" or "experts" begins."""
    return START | (EXPERTS if kind == "experts" else {})


def errors(shares: dict[str, float], kind: str, found: Sequence[Server]) -> list[FloatArray]:
    """Log of predicted over measured TPOT, for each server."""
    roofline.SHARES[kind] = shares | FIXED
    return [np.log(proxy_tpot_ms(server) / server.tpot_ms) for server in found]


def fitted(kind: str, found: Sequence[Server]) -> dict[str, float]:
    """Shares that bring the rows of these servers nearest, each server weighing as 15 rows at most."""
    begin = start_of(kind)
    origin = np.log(list(begin.values()))
    weights = [min(1.0, (15.0 / len(server.tpot_ms)) ** 0.5) for server in found]

    apart = np.zeros(len(found))

    def residuals(logs: FloatArray) -> FloatArray:
        each = errors(dict(zip(begin, np.exp(logs), strict=True)), kind, found)
        own = [weight * (error + gap) for weight, error, gap in zip(weights, each, apart, strict=True)]
        return np.concatenate([*own, HELD[kind] * (logs - origin)])

    for _ in range(2):  # the second time nearer to the twin, which runs some prefills in one step
        result = least_squares(residuals, origin, loss="soft_l1", f_scale=0.1, max_nfev=30)
        shares = dict(zip(begin, (float(f"{value:.5g}") for value in np.exp(result.x)), strict=True))
        plain = errors(shares, kind, found)
        apart = np.array([
            np.nanmedian(np.log(simulated_tpot_ms(server, rows) / server.tpot_ms[rows]) - error[rows])
            for server, error in zip(found, plain, strict=True)
            for rows in [np.arange(len(error))[:: -(-len(error) // COMPARED)]]
        ])  # fmt: skip
    return shares


def told(error: FloatArray) -> str:
    """Median, 90th percentile and bias, %."""
    off = 100.0 * np.expm1(error)
    size = np.abs(off)
    half, nine = np.quantile(size, (0.5, 0.9))
    return f"{len(off):4d} rows: median {half:5.1f}, p90 {nine:5.1f}, bias {off.mean():+5.1f}"


def simulated_errors(shares: dict[str, float], kind: str, found: Sequence[Server]) -> list[FloatArray]:
    """The same by the twin in closed loop, for at most `ROWS` rows of each server."""
    roofline.SHARES[kind] = shares | FIXED
    every = []
    for server in found:
        rows = np.arange(len(server.tpot_ms))[:: -(-len(server.tpot_ms) // ROWS)]
        every.append(np.log(simulated_tpot_ms(server, rows) / server.tpot_ms[rows]))
    return [error[np.isfinite(error)] for error in every]


def left_out(
    kind: str, found: list[Server], group: Callable[[Server], str], errors_of: Callable[..., list[FloatArray]]
) -> list[FloatArray]:
    """Errors of each group's rows by the shares fitted to the other groups."""
    every = []
    for name in sorted({group(each) for each in found}):
        rest = [each for each in found if group(each) != name]
        if rest:
            own = [each for each in found if group(each) == name]
            each = errors_of(fitted(kind, rest), kind, own)
            if not each:
                continue
            every.append(np.concatenate(each))
            print(f"    without {name:45s} {told(every[-1])}", flush=True)
    return every


def after_runs(errors: Sequence[FloatArray]) -> dict[str, float]:
    """Errors of the rows of a server once `RUNS` others of it have moved the level, median and 90th percentile.

    `errors`: of each server, log of the TPOT that shares fitted without it predict over the measured one.
    """
    rng = np.random.default_rng(0)
    left = []
    for error in errors:
        for _ in range(DRAWS):
            drawn = rng.permutation(error)
            left.append(np.abs(np.expm1(drawn[RUNS:] - drawn[:RUNS].mean())))
    half, most = np.quantile(np.concatenate(left), (0.5, 0.9))
    return {"base_tpot_p50": round(float(half), 3), "base_tpot_p90": round(float(most), 3)}


def main() -> None:
    """Fit, print, and write with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true", help="only dense servers are left out")
    parser.add_argument("--simulated", action="store_true", help="errors left out are those of the twin")
    given = parser.parse_args()
    everything = servers()
    lines = []
    for kind in ("dense", "experts"):
        found = [each for each in everything if bool(each.model.experts) == (kind == "experts")]
        shares = fitted(kind, found)
        each = errors(shares, kind, found)
        print(f"{kind}: fitted to all, {told(np.concatenate(each))}")
        for server, error in zip(found, each, strict=True):
            print(f"    {server.name:50s} {told(error)}")
        errors_of = simulated_errors if given.simulated else errors
        groups: dict[str, Callable[[Server], str]] = {
            "server": lambda server: server.name,
            "GPU": lambda server: server.sheet.name,
            "model": lambda server: server.model.name,
            "TP": lambda server: f"TP {server.gpus}",
            "precision": lambda server: server.precision,
        }
        for what, group in groups.items():
            if given.quick and (kind, what) != ("dense", "server"):
                continue
            every = left_out(kind, found, group, errors_of)
            print(f"  {kind}, {what} left out: {told(np.concatenate(every))}")
            if (kind, what) == ("dense", "server"):
                runs = after_runs(every)
                print(f"  {kind}, after {RUNS} runs of the server: {runs}")
        rows = sum(len(server.tpot_ms) for server in found)
        lines += [f"[{kind}]", *(f"{name} = {value!r}" for name, value in (shares | FIXED).items()), ""]
        lines[-1:] = [f'provenance = "{rows} rows of {len(found)} servers"', ""]
    said = f'provenance = "{RUNS} rows of a dense server that was left out, {DRAWS} draws of each server"'
    lines += ["[after_runs]", *(f"{name} = {value!r}" for name, value in runs.items()), said, ""]
    if given.write:
        path = Path(roofline.__file__).with_name("shares.toml")
        text = path.read_text("utf-8")
        head, _, tail = text.partition("[dense]")
        kept = tail[tail.index("# Shares of GPUs without rows") :]
        path.write_text(head + "\n".join(lines) + "\n" + kept, "utf-8")
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
