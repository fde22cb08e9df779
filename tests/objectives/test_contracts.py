"""Every objective of packer keeps the contract that plug-ins are held to."""

from __future__ import annotations

import pytest

from packer.objectives.base import Objective, load_objective
from packer.testing.contracts import ObjectiveContract

SPECS = [
    "gpus",
    "latency",
    "latency:metric=itl,statistic=worst",
    "slo:mean_ttft_ms=1000",
    "headroom:factor=1.5",
    "goodput",
    "cost",
    "moves",
    "tuning:p99_ttft_ms=1000",
]


class TestBuiltIns(ObjectiveContract):
    """The shipped suite, once for each objective."""

    @pytest.fixture(params=SPECS)
    def objective(self, request: pytest.FixtureRequest) -> Objective:
        """The objective under test."""
        return load_objective(request.param)
