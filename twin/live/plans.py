"""Solvers' plans on real servers: equal bins of different plans are measured once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packer.bin import Bin
from packer.plan import Plan
from packer.twin.live.campaign import Progress
from packer.twin.live.launch import Launch
from packer.twin.live.validate import BinReport, Validation, ValidationSpec
from packer.workload import Workload


def distinct_bins(plans: Mapping[str, Plan]) -> tuple[list[Bin], dict[str, list[int]]]:
    """The different bins of several plans of one workload, and where each plan's bins are among them."""
    bins: list[Bin] = []
    known: dict[Any, int] = {}
    places: dict[str, list[int]] = {}
    for name, plan in plans.items():
        places[name] = []
        for bin_ in plan.bins:
            content = (frozenset(_shares(bin_)), bin_.settings, bin_.profile.fingerprint)
            if content not in known:
                known[content] = len(bins)
                bins.append(bin_)
            places[name].append(known[content])
    return bins, places


def _shares(bin_: Bin) -> list[tuple[int, float]]:
    return list(zip(bin_.adapters, bin_.shares, strict=True))


def _key(fleet: Workload, bin_: Bin) -> str:
    """A folder name that says what runs there, so that other plans of the fleet find it again."""
    adapters = sorted((fleet.names[i], share) for i, share in _shares(bin_))
    digest = hashlib.sha256(repr(adapters).encode()).hexdigest()[:12]
    return f"{bin_.max_loras}x{bin_.max_lora_rank}-{len(adapters)}-{digest}"


def measure_plans(
    plans: Mapping[str, Plan],
    fleet: Workload,
    launch: Launch,
    folder: Path,
    spec: ValidationSpec,
    progress: Progress = lambda _what, _done, _total: None,
) -> dict[str, list[BinReport]]:
    """The reports of each plan's bins (name → plan) on real servers; resumes in the same folder."""
    bins, places = distinct_bins(plans)
    keys = [_key(fleet, bin_) for bin_ in bins]
    reports = Validation(launch, fleet, bins, folder, spec, progress, keys).run() if bins else []
    return {name: [reports[i] for i in places[name]] for name in plans}
