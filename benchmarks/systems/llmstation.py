"""LLMStation: fine-tuning beside inference (USENIX ATC 2025), figures 9i, 10, 11 and 13."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmstation_server import BURSTS, DURATION_S, LARGE, LOW, MIDDLE, SMALL, Machine, best, shipped_row
from rows import Constant, Row, Section, mean, of_seeds, shown

import packer
from packer.twin.tuning.policies.llmstation import LLMStation
from packer.twin.tuning.search import candidates, most_training
from packer.workload import Workload

POLICIES = {
    "LLMStation": "llmstation",
    "chunked training": "chunked",
    "vLLM + torchtune (MPS)": "spatial",
    "FineInfer": "temporal",
}
RATES = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
RANGES = {"chunked training": (1.57, 2.18), "vLLM + torchtune (MPS)": (2.53, 14.77), "FineInfer": (2.38, 8.17)}
"""Published for rates of at most 0.5 req/s."""
KAPPAS = LLMStation().kappa_decode, LLMStation().kappa_tuning
ROOM = 1.2
"""Factor by which a ratio may lie outside of a published range."""
DEFERRED_MS = (0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600)
"""FineInfer's deferral bounds where no limit of the TTFT is kept (Figure 10)."""


def throughputs(machine: Machine, rates: Sequence[float], seeds: int) -> dict[str, dict[float, list[float]]]:
    """System → rate → samples/s of each seed."""
    return {
        name: {rate: of_seeds(lambda k, r=rate, p=policy: best(machine, r, p, k), seeds) for rate in rates}
        for name, policy in POLICIES.items()
    }


def ratio_rows(found: dict[str, dict[float, list[float]]], model: str, alone: float | None = None) -> list[Row]:
    """Throughput over each of the others at the rates of the claim; `alone`: samples/s without requests."""
    rows = []
    for name, (low, high) in RANGES.items():
        for rate in (rate for rate in found[name] if rate <= LOW):
            both = zip(found["LLMStation"][rate], found[name][rate], strict=True)
            ratios = [a / max(b, 1e-9) for a, b in both]
            most = 0.0 if alone is None else alone / max(mean(found[name][rate]), 1e-9)
            rows.append(
                Row(
                    f"Fig. 9i, {model}, {rate:g} req/s: samples/s of LLMStation / {name}",
                    f"{low:g}–{high:g} at ≤ {LOW:g} req/s",
                    shown(ratios),
                    "in this range, by a factor of 1.2 at most outside",
                    low / ROOM <= mean(ratios) <= high * ROOM,
                    ""
                    if not most or rate == LOW
                    else f"a server without requests trains {most:.2f} times as much as {name} here: more is not left",
                )
            )
    return rows


def order_rows(found: dict[str, dict[float, list[float]]], model: str) -> list[Row]:
    """What the curves say in words."""
    means = {name: {rate: mean(values) for rate, values in of.items()} for name, of in found.items()}
    highest = all(max(means, key=lambda name: means[name][rate]) == "LLMStation" for rate in RATES if rate <= LOW)
    gone = {name: next((rate for rate, value in of.items() if value < 0.05), None) for name, of in means.items()}
    others = [rate for name, rate in gone.items() if name != "FineInfer" and rate is not None]
    first = gone["FineInfer"] is not None and all(gone["FineInfer"] < rate for rate in others)
    last = max(rate for rate in RATES if min(means[n][rate] for n in ("LLMStation", "chunked training")) > 0.05)
    spread = means["LLMStation"][last] / max(means["chunked training"][last], 1e-9)
    apart = {r: means["LLMStation"][r] / max(means["chunked training"][r], 1e-9) for r in RATES if LOW < r <= last}
    text = "; ".join(
        f"{rate:g} req/s: " + " / ".join(f"{means[name][rate]:.2f}" for name in POLICIES) for rate in RATES
    )
    return [
        Row(f"Fig. 9i, {model}: samples/s ({' / '.join(POLICIES)})", "curves unreadable", text, basis="untestable"),
        Row(
            f"Fig. 9i, {model}: highest at ≤ {LOW:g} req/s",
            "LLMStation",
            "LLMStation" if highest else "another",
            "LLMStation highest at each rate",
            highest,
        ),
        Row(
            f"Fig. 9i, {model}: first without training as the rate rises",
            "FineInfer",
            ", ".join(f"{name}: {rate:g} req/s" for name, rate in gone.items() if rate is not None) or "none",
            "FineInfer first (< 0.05 samples/s)",
            first,
        ),
        Row(
            f"Fig. 9i, {model}: the others converge at high rates",
            "throughput of LLMStation and chunked training becomes very close",
            f"ratio {spread:.1f} at {last:g} req/s",
            "at most 1.3 at the highest rate with training of both",
            spread <= 1.3,
            f"by the paper's own rules a chunk needs {SMALL.weights_ms:g} ms for the weights before it trains, and "
            "each ms that the limit leaves gives a fused forward pass 1 ms and a backward pass "
            f"{(1 + KAPPAS[0]) / KAPPAS[0] / (1 + KAPPAS[1]):.1f} ms: the less is left, the further they are apart; at "
            + ", ".join(f"{rate:g} req/s {ratio:.1f}" for rate, ratio in apart.items()),
        ),
    ]


def large_rows(seeds: int) -> list[Row]:
    """70B on two servers: FineInfer and torchtune train on one of them, LLMStation and chunks on both."""
    rate = 1.0
    silent = 1e-6
    ours = of_seeds(lambda k: best(LARGE, rate, "llmstation", k) + best(LARGE, silent, "llmstation", k), seeds)
    chunked = of_seeds(lambda k: best(LARGE, rate, "chunked", k) + best(LARGE, silent, "chunked", k), seeds)
    alone = of_seeds(lambda k: best(LARGE, silent, "temporal", k), seeds)
    rows = []
    for name, published, most, values in (
        ("FineInfer, vLLM + torchtune", "≤ 1.77, ≤ 1.80", 1.77, alone),
        ("chunked training", "≤ 1.38", 1.38, chunked),
    ):
        ratios = [a / b for a, b in zip(ours, values, strict=True)]
        rows.append(
            Row(
                f"Fig. 9i, 70B on two servers, {rate:g} req/s: samples/s of LLMStation / {name}",
                published,
                shown(ratios),
                "above 1, and at most 1.2 times as much",
                1.0 < mean(ratios) <= ROOM * most,
            )
        )
    return rows


@dataclass(frozen=True)
class Curves:
    """A figure of latencies over training throughput: the machine, req/s of each server, and what was published."""

    figure: str
    machine: Machine
    rate: float
    systems: tuple[str, ...]
    low: str
    ratios: str
    tpot: str
    most: dict[str, float]


CURVES = (
    Curves(
        "Fig. 10, 8B, 0.88 req/s", SMALL, 0.88, tuple(POLICIES),
        "LLMStation and chunked low, FineInfer > 8 s at 1.6 samples/s", "≤ 33.1 / 52.6 / 1.40", "36",
        {"FineInfer": 33.1, "vLLM + torchtune (MPS)": 52.6, "chunked training": 1.40},
    ),
    Curves(
        "Fig. 11, 70B on two servers, 4.15 req/s", LARGE, 2.075, ("LLMStation", "chunked training", "FineInfer"),
        "FineInfer > 25 s at high throughput; torchtune can't run", "≤ 180.5 / – / 1.23", "28",
        {"FineInfer": 180.5, "chunked training": 1.23},
    ),
)  # fmt: skip


def curve(case: Curves, policy: str, seed: int) -> list[tuple[float, float, float]]:
    """(samples/s, P99 TTFT, P99 TPOT) of a server for each value of the policy's parameter, under bursts."""
    fleet = case.machine.fleet(case.rate).with_arrivals(BURSTS)
    points = []
    specs = [f"temporal:defer_ms={ms}" for ms in DEFERRED_MS] if policy == "temporal" else candidates(policy)
    for spec in specs:
        sim = packer.simulate(
            fleet, case.machine.profile(), max_loras=1, duration_s=2 * DURATION_S, seed=seed, tuning=spec
        )
        assert sim.tuning is not None
        points.append((sim.tuning.samples_s, sim.p99_ttft_ms, sim.p99_tpot_ms))
    return points


def at_throughput(points: list[tuple[float, float, float]], samples_s: float) -> tuple[float, float] | None:
    """Least P99 TTFT and least P99 TPOT among the points that train at least so much."""
    good = [(ttft, tpot) for trained, ttft, tpot in points if trained >= samples_s]
    return (min(a for a, _ in good), min(b for _, b in good)) if good else None


def latency_rows(case: Curves, seeds: int) -> list[Row]:
    """Latencies at a given training throughput."""
    curves = {name: of_seeds(lambda k, p=POLICIES[name]: curve(case, p, k), seeds) for name in case.systems}
    reach = {name: mean([max(p[0] for p in points) for points in of]) for name, of in curves.items()}
    high = 0.95 * min(min(max(p[0] for p in points) for points in of) for of in curves.values())
    low = 0.05 * high
    ttft_ms, tpot_low = {}, {}
    idle = mean([min(points)[0] for points in curves["LLMStation"]])
    loose = mean([max(points)[2] for points in curves["LLMStation"]])
    for name, of in curves.items():
        ttft_ms[name] = [found[0] for points in of if (found := at_throughput(points, high))]
        tpot_low[name] = mean([found[1] for points in of if (found := at_throughput(points, low))])
    ttft = {name: mean(values) for name, values in ttft_ms.items()}
    others = ("FineInfer", "vLLM + torchtune (MPS)", "chunked training")
    return [
        Row(
            f"{case.figure}: P99 TTFT, ms, at {high:.2f} samples/s a server (highest that all reach)",
            case.low,
            ", ".join(f"{name} {shown(values, 0)}" for name, values in ttft_ms.items()),
            "FineInfer ≥ 5 × LLMStation",
            ttft["FineInfer"] >= 5.0 * ttft["LLMStation"],
            "largest training throughput: " + ", ".join(f"{name} {value:.2f}" for name, value in reach.items()),
        ),
        Row(
            f"{case.figure}: P99 TTFT over LLMStation's (FineInfer / torchtune / chunked)",
            case.ratios,
            " / ".join(f"{ttft[name] / ttft['LLMStation']:.2f}" if name in ttft else "–" for name in others),
            "above 1, and at most 1.2 times as much; FineInfer's at least half",
            all(1.0 < ttft[name] / ttft["LLMStation"] <= ROOM * most for name, most in case.most.items())
            and ttft["FineInfer"] / ttft["LLMStation"] >= 0.5 * case.most["FineInfer"],
        ),
        Row(
            f"{case.figure}: P99 TPOT, ms, at {low:.2f} samples/s a server",
            f"FineInfer up to {case.tpot} % below LLMStation",
            ", ".join(f"{name} {value:.1f}" for name, value in tpot_low.items()),
            "FineInfer at least 5 % below",
            tpot_low["FineInfer"] <= 0.95 * tpot_low["LLMStation"],
            f"idle times alone train {idle:.2f} samples/s here, so that no policy "
            "trains in the same step as a decode at so low a throughput; where LLMStation trains most, "
            f"FineInfer's is {100.0 * (1.0 - tpot_low['FineInfer'] / loose):.0f} % below its {loose:.1f} ms",
        ),
    ]


def effects(seeds: int) -> list[Row]:
    """What the assumptions do to the ratio at the rate of the claim."""

    def ratio(machine: Machine, seed: int, tokens: float = 512.0, **ours: float) -> float:
        del tokens
        return best(machine, LOW, "llmstation", seed, **ours) / best(machine, LOW, "chunked", seed)

    def with_tokens(tokens: float, seed: int) -> float:
        limits = {"server.p99_ttft_ms": 500.0, "server.p99_tpot_ms": SMALL.tpot_ms}
        given = {"max_loras": 1, "slo": limits, "duration_s": DURATION_S, "seed": seed}
        fleet, profile = SMALL.steady(LOW, seed, tokens), SMALL.profile()
        ours = most_training(fleet, profile, "llmstation", **given)
        return ours.samples_s / most_training(fleet, profile, "chunked", **given).samples_s

    changes = {
        "kappas twice as large (0.7, 0.5)": lambda k: ratio(SMALL, k, kappa_decode=0.7, kappa_tuning=0.5),
        "kappas 0": lambda k: ratio(SMALL, k, kappa_decode=0.0, kappa_tuning=0.0),
        "decode limit fixed at 45 ms": lambda k: ratio(SMALL, k, slo_decode_ms=45.0),
        "samples of 256 tokens": lambda k: with_tokens(256.0, k),
        "samples of 1,024 tokens": lambda k: with_tokens(1024.0, k),
        "weights read in 14 ms": lambda k: ratio(replace(SMALL, weights_ms=14.0), k),
    }
    return [
        Row(f"effect on the ratio to chunked training: {name}", "–", shown(of_seeds(run, seeds)))
        for name, run in changes.items()
    ]


def busy(machine: Machine, served: int = 4) -> Workload:
    """The requests of section 6.3 for so many adapters."""
    return machine.fleet(BUSY, served=served).with_arrivals(BURSTS)


OVER = {"FineInfer": 2.98, "vLLM + torchtune (MPS)": 2.41, "chunked training": 1.74}
"""LLMStation's samples/s over theirs, at most."""
RANK_MS = 1e3 * 32 * 2 * 26_624 / (0.7 * 2 * 936e9)
BUSY = 0.88
RANKS = {"none": (32, 0.0), "rank 8": (8, RANK_MS), "rank 32": (32, RANK_MS)}
"""Access to four of eight adapters: their rank, and time of a request's rank."""


def access_rows(seeds: int) -> list[Row]:
    """Figure 13: what the served adapters cost, none or four of eight."""
    machines = {name: replace(SMALL, rank=rank, rank_ms=ms) for name, (rank, ms) in RANKS.items()}
    found = {
        name: {
            system: of_seeds(lambda k, m=machine, p=policy: best(m, BUSY, p, k, busy(m), 4 * DURATION_S), seeds)
            for system, policy in POLICIES.items()
        }
        for name, machine in machines.items()
    }
    means = {name: {system: mean(values) for system, values in of.items()} for name, of in found.items()}
    ours = [of["LLMStation"] for of in means.values()]
    ttft_ms = packer.simulate(
        busy(machines["rank 32"], 8), machines["rank 32"].profile(), max_loras=8, duration_s=2 * DURATION_S,
        tuning="none",
    ).p99_ttft_ms  # fmt: skip
    step_ms = SMALL.base_ms + 4 * SMALL.per_decode_ms
    share = 100.0 * 4 * 32 * RANK_MS / step_ms
    return [
        Row(
            f"Fig. 13, {BUSY:g} req/s: samples/s of LLMStation, no adapter accessed / 4 of 8 of rank 8 / of rank 32",
            "decreases slightly with access and rank",
            " / ".join(f"{value:.2f}" for value in ours),
            "falling, by 10 % at most",
            ours[0] >= ours[1] >= ours[2] >= 0.9 * ours[0],
        ),
        *(
            Row(
                f"Fig. 13: LLMStation over {name}, no adapter accessed; of rank 32",
                f"≤ {most}",
                "; ".join(f"{of['LLMStation'] / of[name]:.2f}" for of in (means["none"], means["rank 32"])),
                "above 1, and at most 1.2 times as much",
                all(1.0 < of["LLMStation"] / of[name] <= ROOM * most for of in (means["none"], means["rank 32"])),
                ""
                if name != "vLLM + torchtune (MPS)"
                else f"it trains {means['none'][name]:.2f} samples/s: the largest share that keeps P99 TTFT in bursts",
            )
            for name, most in OVER.items()
        ),
        Row(
            "Fig. 13, rank 32, uniform access to 8 adapters",
            "no system keeps the TTFT limit",
            f"P99 TTFT without training {ttft_ms:.0f} ms",
            "above 500 ms",
            ttft_ms > 500.0,
            f"LoRA takes {share:.1f} % of a step of four requests: 2.5 times as much, as the paper cites for distinct "
            "adapters, is still little",
        ),
    ]


def section(seeds: int) -> Section:
    """The whole comparison."""
    small = throughputs(SMALL, RATES, seeds)
    middle = throughputs(MIDDLE, (LOW,), seeds)
    rows = [
        *ratio_rows(small, "8B", mean(of_seeds(lambda k: best(SMALL, 1e-6, "llmstation", k), 1))),
        *order_rows(small, "8B"),
        *ratio_rows(middle, "13B"),
        *large_rows(seeds),
        *(row for case in CURVES for row in latency_rows(case, seeds)),
        shipped_row(seeds),
        *effects(seeds),
        *access_rows(seeds),
    ]
    return Section(
        "llmstation",
        "LLMStation: fine-tuning beside inference",
        "Resource Multiplexing in Tuning and Serving Large Language Models, USENIX ATC 2025",
        CONSTANTS,
        rows,
        (
            "Each policy runs with the value of its parameter that trains most while P99 TTFT and P99 TPOT hold, as "
            "the paper tuned its baselines. LLMStation's decode limit is searched as well: TPOT is a mean over a "
            "request, so that single iterations may exceed it, and prefills add to it.",
            "No constant was fitted to a result of the paper.",
        ),
        figures={"samples_s": {name: {str(r): v for r, v in of.items()} for name, of in small.items()}},
    )


CONSTANTS = (
    Constant("limits", "P99 TTFT 500 ms; P99 TPOT 50 ms (8B), 80 ms (larger)", "T"),
    Constant("layers, ranks", "32 / 40 / 80; 8 / 16 / 32", "T", "Table 1 says 32 layers for 13B, section 6.4 says 40"),
    Constant("decode step, 8B on 2 RTX 3090", "14 + 0.15 ms per request", "D", "16 GB in 8.6 ms, and the host"),
    Constant("prefill and forward pass, 8B", "0.225 ms per token", "D", "2 · 8e9 FLOPs at half of 2 · 71 TFLOPS"),
    Constant("pass over the weights, 8B", "8.6 ms", "D", "paid by each chunk, and once by a whole sample"),
    Constant("13B on 4 RTX 3090", "14 + 0.2 ms; 0.183 ms per token; 7 ms", "D"),
    Constant("70B on 4 H100", "18 + 0.1 ms; 0.071 ms per token; 10.5 ms", "D"),
    Constant("backward / forward", "1", "D", "frozen weights: activation gradients only"),
    Constant("sample", "512 tokens, batch 1", "A", "the paper's Alpaca lengths are not given; effect shown"),
    Constant("kappa of decoding, of training", "0.35, 0.25", "A", "effect shown"),
    Constant("MPS interference", "1 per unit of share; prefills / (1 − share)", "A"),
    Constant("rank of a served adapter, Fig. 13", "its bytes (q, k, v, o) at 70 % of 2 · 936 GB/s", "A"),
    Constant("requests", "223 input, 195 output tokens, exponential", "A", "ShareGPT"),
    Constant("arrivals of Fig. 9i", 'at equal distances: "a steady rate"', "T"),
    Constant("arrivals of Fig. 10, 11 and 13", "bursts of cv 1 over 20 s", "A", "the pieces of BurstGPT are not given"),
)
