"""The main paper's comparison on four GPUs (arXiv 2602.24044, section 8.4), with dLoRA's and Dynamo's placements."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
from mainpaper_runs import GPUS, LLAMA, METHODS, QWEN, SCENARIOS, Found, Outcome, Scenario, largest, outcomes, placed
from rows import Constant, Row, Section, mean, shown, table

import packer
from packer.solvers.backbone import backbone_tok_s


def cell(results: list[Outcome]) -> str:
    """Mean GPUs of those that hold, and how many fail (s: starved or memory error; r: refused)."""
    gpus = [each.gpus for each in results if each.gpus is not None]
    text = f"{np.mean(gpus):.1f}" if gpus else "–"
    failed = sum(each.gpus is None and not each.refused for each in results)
    refused = sum(each.refused for each in results)
    return text + (f" {failed}s" if failed else "") + (f" {refused}r" if refused else "")


def scenario_rows(found: Found, scenario: Scenario) -> list[Row]:
    """Figure 11 for one scenario: the claims."""
    fewest, compared = 0, 0
    fewer: Counter[str] = Counter()
    for n in scenario.sizes:
        for k, ours in enumerate(found[scenario.name, "Proposed", n]):
            others = {m.name: found[scenario.name, m.name, n][k].gpus for m in METHODS if m.name != "packer"}
            if ours.gpus is not None:
                below = [name for name, gpus in others.items() if gpus is not None and gpus < ours.gpus]
                compared += 1
                fewest += not below
                fewer.update(below)
    every = [each for n in scenario.sizes for each in found[scenario.name, "Proposed", n]]
    kept = [each for each in every if not each.refused]
    held = sum(each.gpus is not None for each in kept)
    lost = {
        method.name: sum(each.gpus is None for n in scenario.sizes for each in found[scenario.name, method.name, n])
        for method in METHODS
    }
    fails = sum(lost[method.name] for method in METHODS if method.name in ("MaxBase", "MaxBase*"))
    return [
        Row(
            f"Fig. 11, {scenario.name}: Proposed uses the fewest GPUs of those that hold",
            "yes",
            f"{fewest} of {compared} fleets",
            "in at least 0.9 of the fleets",
            fewest >= 0.9 * compared,
            ", ".join(f"{name} fewer in {count}" for name, count in fewer.items()),
        ),
        Row(
            f"Fig. 11, {scenario.name}: allocations of Proposed hold",
            "consistently",
            f"{held} of {len(kept)}",
            "at least 0.9",
            held >= 0.9 * len(kept),
            "" if held >= 0.9 * len(kept) else "a forest's error near the edge, as the paper has for its tree",
        ),
        *reach_rows(found, scenario),
        Row(
            f"Fig. 11, {scenario.name}: MaxBase and MaxBase* starve or fail",
            "frequently",
            f"{fails} of {2 * sum(len(found[scenario.name, 'MaxBase', n]) for n in scenario.sizes)} allocations",
            "at least a quarter",
            4 * fails >= 2 * sum(len(found[scenario.name, "MaxBase", n]) for n in scenario.sizes),
        ),
    ]


def first_plot_rows(seeds: int) -> list[Row]:
    """Figure 11, leftmost (Qwen): fewer than 50 adapters on one GPU, all four only for more than 80.

    Of the paper's rates only the high ones give 80 adapters a load that one GPU can't serve.
    """
    proposed, profile = METHODS[0], packer.load_profile(QWEN)
    scenario, found = Scenario(QWEN, "high", "8–32", ()), {}
    for n in (48, 96):
        solutions = [placed(proposed, scenario.fleet(n, seed), profile, seed)[0] for seed in range(seeds)]
        found[n] = [0 if each.unplaced else len(each.bins) for each in solutions]
    text = "; ".join(
        f"{n}: " + ", ".join("refused" if not gpus else str(gpus) for gpus in of) for n, of in found.items()
    )
    load = scenario.fleet(48, 0).offered_tok_s
    most = backbone_tok_s(scenario.fleet(48, 0), profile)
    return [
        Row(
            "Fig. 11, Qwen, leftmost plot: GPUs of Proposed for 48 and for 96 adapters",
            "1 for fewer than 50; 4 only for more than 80",
            text,
            "1 and 4 in at least 0.9 of the fleets",
            sum(gpus == 1 for gpus in found[48]) >= 0.9 * seeds and sum(gpus == 4 for gpus in found[96]) >= 0.9 * seeds,
            f"48 adapters of the high rates send {load:,.0f} tok/s, and a GPU serves {most:,.0f} without adapters; "
            "Algorithm 1 refuses a fleet whose last test fails, though other GPUs are free",
        )
    ]


BASELINES = ("MaxBase", "MaxBase*", "Random")
"""Of Figure 11."""


def reach_rows(found: Found, scenario: Scenario) -> list[Row]:
    """Figure 11 for one scenario: how many adapters Proposed serves, and the baselines."""
    reach = scenario.reach or scenario.sizes[-1]
    sizes = [n for n in scenario.sizes if n <= reach]
    seeds = range(len(found[scenario.name, "Proposed", reach]))

    def holds(method: str, n: int, k: int) -> bool:
        return found[scenario.name, method, n][k].gpus is not None

    fleets = [(n, k) for n in sizes for k in seeds]
    possible = [each for each in fleets if any(holds(name, *each) for name in BASELINES)]
    served = sum(holds("Proposed", *each) for each in possible)
    counts = {name: sum(holds(name, *each) for each in fleets) for name in ("Proposed", *BASELINES)}
    last, beyond = sum(holds("Proposed", reach, k) for k in seeds), scenario.sizes[-1]
    refused = sum(found[scenario.name, "Proposed", reach][k].refused for k in seeds)
    fleet, profile = scenario.fleet(beyond, 0), packer.load_profile(scenario.profile)
    load, most = fleet.offered_tok_s_by_adapter.sum() / GPUS, backbone_tok_s(fleet, profile)
    if scenario.reach is None:
        return [
            Row(
                f"Fig. 11, {scenario.name}: Proposed serves what a baseline serves",
                "yes",
                f"{served} of {len(possible)} fleets",
                "at least 0.9",
                served >= 0.9 * len(possible),
            )
        ]
    heavy = f"{beyond} adapters send {load:,.0f} tok/s to a GPU, which serves {most:,.0f} without adapters"
    rates = {k: scenario.fleet(reach, k).rates.sum() for k in seeds}
    good = [f"{rates[k]:.0f}" for k in seeds if holds("Proposed", reach, k)]
    bad = [f"{rates[k]:.0f}" for k in seeds if not holds("Proposed", reach, k)]
    drawn = f"fleets drawn with {', '.join(good) or 'no'} req/s hold, with {', '.join(bad)} they do not"
    rows = [
        Row(
            f"Fig. 11, {scenario.name}: Proposed serves {reach:,} adapters",
            "yes",
            f"{last} of {len(seeds)} fleets; {refused} refused",
            "at least 0.9",
            last >= 0.9 * len(seeds),
            drawn if last < 0.9 * len(seeds) else "",
        )
    ]
    text = ", ".join(f"{name} {count}" for name, count in counts.items()) + f" of {len(fleets)} fleets"
    if scenario.further:
        rows.append(
            Row(
                f"Fig. 11, {scenario.name}: more fleets than the baselines, up to {reach:,} adapters",
                "yes",
                text,
                "Proposed most",
                counts["Proposed"] > max(counts[name] for name in BASELINES),
            )
        )
        return rows
    lucky = sum(holds("Random", beyond, k) for k in seeds)
    rows.append(
        Row(
            f"Fig. 11, {scenario.name}: Random serves {beyond} adapters, which Proposed does not",
            "yes, by chance",
            f"Random {lucky}, Proposed {sum(holds('Proposed', beyond, k) for k in seeds)} of {len(seeds)} fleets",
            "at least one fleet of Random's, none of Proposed's",
            lucky > 0 and not any(holds("Proposed", beyond, k) for k in seeds),
            heavy,
        )
    )
    return rows


def gpus_table(found: Found, scenario: Scenario) -> str:
    """Figure 11 for one scenario: mean GPUs of each method by the number of adapters."""
    rows = [[method.name, *(cell(found[scenario.name, method.name, n]) for n in scenario.sizes)] for method in METHODS]
    title = f"GPUs by adapters, {scenario.name} (s: starved or memory error, r: refused by the method)"
    return table(title, ["", *map(str, scenario.sizes)], rows)


def latency_rows(found: Found) -> list[Row]:
    """Figure 12: dLoRA and ProposedLat use all GPUs for lower latency (Qwen)."""
    rows = []
    for scenario in SCENARIOS[:2]:
        pairs: dict[str, list[float]] = {"dLoRA": [], "ProposedLat": [], "Proposed": []}
        gpus: list[int] = []
        for n in scenario.sizes:
            for triple in zip(*(found[scenario.name, name, n] for name in pairs), strict=True):
                if all(each.gpus is not None for each in triple):
                    for name, each in zip(pairs, triple, strict=True):
                        pairs[name].append(each.itl_ms)
                    gpus.append(triple[0].gpus or 0)
        means = {name: mean(values) for name, values in pairs.items()}
        rows += [
            Row(
                f"Fig. 12, {scenario.name}: mean ITL, ms (dLoRA / ProposedLat / Proposed)",
                "dLoRA lowest, ProposedLat comparable",
                " / ".join(f"{value:.1f}" for value in means.values()) + f" on {len(gpus)} fleets",
                "dLoRA < Proposed, ProposedLat within 10 % of dLoRA",
                means["dLoRA"] < means["Proposed"] and abs(means["ProposedLat"] / means["dLoRA"] - 1.0) <= 0.1,
            ),
            Row(
                f"Fig. 12, {scenario.name}: GPUs of dLoRA",
                "all 4",
                f"{min(gpus, default=0)} to {max(gpus, default=0)}",
                "always 4",
                min(gpus, default=0) == GPUS,
                "it is given all GPUs",
                "fitted",
            ),
        ]
    return rows + refusal_rows(found)


def refusal_rows(found: Found) -> list[Row]:
    """Section 8.4.4: ProposedLat proposes nothing that starves, and serves fewer adapters than Proposed (Qwen)."""
    top, bottom = (scenario.name for scenario in SCENARIOS[:2])
    mine = [e for (s, m, _), es in found.items() if m == "ProposedLat" and s in (top, bottom) for e in es]
    proposed = [e for e in mine if not e.refused]
    held = sum(e.gpus is not None for e in proposed)
    methods = {method.name: method for method in METHODS}
    seeds = range(len(found[top, "Proposed", SCENARIOS[0].sizes[-1]]))
    most = [
        mean([largest(methods[name], SCENARIOS[0], seed) for seed in seeds]) for name in ("ProposedLat", "Proposed")
    ]
    return [
        Row(
            "Fig. 12, Qwen: allocations that ProposedLat proposes hold",
            "consistently",
            f"{held} of {len(proposed)}; {len(mine) - len(proposed)} refused",
            "at least 0.9",
            held >= 0.9 * len(proposed),
        ),
        Row(
            f"Fig. 12, {top}: most adapters, ProposedLat / Proposed",
            "fewer than Proposed",
            f"{most[0]:.0f} / {most[1]:.0f}",
            "fewer",
            most[0] < most[1],
        ),
    ]


PUBLISHED_S = {
    "Proposed": ("2.16", "2.18"),
    "ProposedFast": ("2.17e-3", "9.61e-4"),
    "MaxBase": ("6.22e-4", "5.28e-4"),
    "MaxBase*": ("6.50e-4", "5.40e-4"),
    "Random": ("6.52e-4", "6.37e-4"),
    "dLoRA": ("1.52e-1", "2.34e-2"),
}


FOREST_MS = {LLAMA: 0.25 + 0.16, QWEN: 0.21 + 0.22}
"""Time of a prediction, of throughput and of starvation, by the paper's forest: Table 4."""


def of_model(found: Found, profile: str) -> list[Outcome]:
    """Outcomes of Proposed with one of the models."""
    names = [scenario.name for scenario in SCENARIOS if scenario.profile == profile]
    return [e for (s, m, _), es in found.items() if s in names and m == "Proposed" for e in es]


def time_rows(found: Found) -> list[Row]:
    """Table 5: time of a placement on four GPUs."""
    rows, medians = [], {}
    for method in METHODS:
        by_model = []
        for profile in (LLAMA, QWEN):
            names = [scenario.name for scenario in SCENARIOS if scenario.profile == profile]
            by_model.append(
                float(
                    np.median(
                        [e.seconds for (s, m, _), es in found.items() if s in names and m == method.name for e in es]
                    )
                )
            )
        medians[method.name] = by_model
        rows.append(
            Row(
                f"Table 5: CPU time of {method.name}, s (Llama / Qwen), median",
                " / ".join(PUBLISHED_S.get(method.name, ("not in the paper",))),
                " / ".join(f"{value:.2g}" for value in by_model),
                basis="untestable" if method.name in PUBLISHED_S else "claim",
            )
        )
    fast, slow = medians["ProposedFast"], medians["Proposed"]
    with_forest = [
        float(np.median([e.seconds + 1e-3 * FOREST_MS[profile] * e.predictions for e in of_model(found, profile)]))
        for profile in (LLAMA, QWEN)
    ]
    counts = [max(e.predictions for e in of_model(found, profile)) for profile in (LLAMA, QWEN)]
    rows.append(
        Row(
            "Table 5: Proposed over ProposedFast, with Table 4's time of scikit-learn's forest (Llama / Qwen)",
            "995 / 2,268",
            f"{with_forest[0] / fast[0]:.0f} / {with_forest[1] / fast[1]:.0f}",
            "within a factor of 3",
            with_forest[0] / fast[0] >= 995 / 3 and with_forest[1] / fast[1] >= 2268 / 3,
            f"{slow[0] / fast[0]:.1f} / {slow[1] / fast[1]:.1f} with packer's compiled forest; the paper's "
            f"seconds are of {2160 / FOREST_MS[LLAMA]:,.0f} / {2180 / FOREST_MS[QWEN]:,.0f} predictions, its "
            f"algorithms to the letter make {counts[0]} / {counts[1]}",
        )
    )
    return rows


def authors_s(adapters: int) -> float:
    """Time that the smallest burst tolerance takes, computed anew for the first replica of each adapter, s.

    As `calc_min_bt` of dLoRA's artifact does it, with a list of adapters for each engine.
    """
    held: list[list[int]] = [[] for _ in range(GPUS)]
    sampled = 0.0
    for a in range(adapters):
        held[a % GPUS].append(a)
        if a % 64 == 63:
            at = time.process_time()
            min(sum(1.0 for engine in held if x in engine) for x in range(adapters))
            sampled += time.process_time() - at
    return 64.0 * sampled


def section(seeds: int) -> Section:
    """The whole comparison."""
    found = outcomes(seeds)
    rows = [row for scenario in SCENARIOS for row in scenario_rows(found, scenario)]
    rows += first_plot_rows(seeds) + latency_rows(found) + time_rows(found)
    rows.append(
        Row(
            "Fig. 12: dLoRA beyond one hour for large fleets",
            "time limit of one hour",
            shown([e.seconds for (_, m, n), es in found.items() if m == "dLoRA" and n == 1280 for e in es], 3)
            + " s at 1,280 adapters",
            "more than an hour",
            False,
            "a property of its authors' implementation, ours evaluates a trial in constant time; their loop over "
            f"adapters, engines and lists takes {authors_s(1280):.0f} s for the first replica of each, in Python",
        )
    )
    return Section(
        "mainpaper",
        "Data-driven placement, dLoRA and Dynamo on four GPUs",
        "arXiv 2602.24044, section 8.4; dLoRA: OSDI 2024; NVIDIA Dynamo 1.3–1.4, pull requests 5992, 8177, 10385",
        CONSTANTS,
        rows,
        (
            "Every placement is simulated for an hour with a seed that no search has used; the paper ran them on the "
            "real engine. Only the order of methods is compared: which fleets were drawn is not published.",
            "Dynamo's placements are our reading of public pull requests: rendezvous hashing with slots, and min-cost "
            "flow (load, less a bonus for adapters that already run); they take all GPUs and have no notion of "
            "starvation.",
        ),
        tables=[gpus_table(found, scenario) for scenario in SCENARIOS],
    )


CONSTANTS = (
    Constant("rates, req/s", "high 2.4–0.15, low 0.075–0.0047, mixed 0.6–0.0375", "T"),
    Constant("ranks", "8; 32; 8, 16, 32", "T"),
    Constant("servers", "shipped profiles of both models, H100 64 GB", "F", "to public runs of single servers"),
    Constant("numbers of adapters", "16 to 1,600", "A", "curves unreadable; the text names 128, 160 and 1,280"),
    Constant("Proposed", "`greedy-paper` with a random forest", "T"),
    Constant("ProposedFast", "`greedy-paper` with a small tree", "T"),
    Constant("slots of the baselines", "MaxBase: all adapters; MaxBase*: half; Random: uniform", "T"),
)
