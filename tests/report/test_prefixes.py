"""A plan says that it assumes no shared prefixes, and what they would change; with shared prefixes it says nothing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from packer.adapter import Adapter
from packer.io.plans import plan_from_dict, plan_to_dict
from packer.io.profiles import load_profile
from packer.plan import Plan
from packer.planning.solve import solve
from packer.report.prefixes import prefix_figures, prefix_words
from packer.sessions import Sessions
from packer.twin.override import with_engine
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{i}", 8, 0.6) for i in range(12)])


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan for servers that cache prefixes."""
    profile = with_engine(load_profile("h100-64gb/llama-3.1-8b-instruct"), vllm_version="0.32.0")
    return solve(FLEET, profile, objective="gpus", seed=1)


def test_the_busiest_server_is_faster_with_half_of_its_prompts_cached(plan: Plan) -> None:
    """The sentence names the hit rate and two figures of a server, of which the cached ones are lower."""
    said, figures = prefix_words(plan), prefix_figures(plan)
    assert said is not None
    assert figures is not None
    assert said.startswith("no shared prefixes assumed")
    found = re.search(
        r"with (\d+)% .* TTFT of ([\d,]+) ms instead of ([\d,]+) ms .* ITL of ([\d.]+) ms instead of ([\d.]+)", said
    )
    assert found is not None
    share, *times = (float(text.replace(",", "")) for text in found.groups())
    assert share == pytest.approx(50, abs=2)
    assert times[0] < times[1]
    assert times[2] < times[3]
    assert figures["hit_rate"] == pytest.approx(share / 100, abs=0.01)
    assert [figures["mean_ttft_ms"][key] for key in ("shared", "assumed")] == pytest.approx(times[:2], abs=0.5)
    printed = plan_to_dict(plan) | {"prefixes": figures}
    assert plan_from_dict(printed).n_gpus == plan.n_gpus


def test_prefixes_that_are_given_or_not_cached_have_no_figures(plan: Plan) -> None:
    """Given ones need no sentence; of servers without a cache it says that a hit rate changes nothing."""
    for given in (
        {"sessions": Sessions(3.0)},
        {"adapters": (Adapter("a", 8, 1.0, shared_prefix_tokens=99),)},
    ):
        assert prefix_words(replace(plan, workload=replace(FLEET, **given))) is None
    old = load_profile("h100-64gb/llama-3.1-8b-instruct")
    bins = tuple(replace(item, profile=old) for item in plan.bins)
    uncached = replace(plan, bins=bins)
    said = prefix_words(uncached)
    assert said is not None
    assert "a hit rate of 50% would change nothing" in said
    assert prefix_figures(uncached) == {"assumed_hit_rate": 0.0}
