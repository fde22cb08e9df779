"""Servers from a GPU and a model: as many GPUs each as were asked for, at the price of all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from packer.adapter import Adapter
from packer.errors import IncompatibleError
from packer.lengths import Lengths
from packer.operate.project import profile_for, profiles_for
from packer.planning.recommend import recommend
from packer.twin.datasheets import datasheet
from packer.twin.memory.starts import starting
from packer.workload import Workload

MODEL, SETTINGS = "Qwen/Qwen3-32B", {"max_model_len": 4096}


def sizes(*gpus: int) -> dict[str, Sequence[int]]:
    """Tensor-parallel sizes as they are asked for."""
    return {"tensor_parallel_size": gpus}


def test_a_server_costs_what_its_gpus_cost() -> None:
    """Each size that starts is one profile, its price the GPUs times that of one; others are left out."""
    found = profiles_for(MODEL, "h100-80gb", sizes(1, 2, 4, 8, 2), {**SETTINGS, "quantization": "fp8"})
    one = datasheet("h100-80gb").price_per_hour or 0.0
    assert [each.engine.tensor_parallel_size for each in found] == [1, 2, 4, 8]
    assert [each.gpu.price_per_hour for each in found] == [pytest.approx(n * one) for n in (1, 2, 4, 8)]
    small = profiles_for(MODEL, "rtx4090", sizes(1, 2, 4, 8), SETTINGS)
    assert [each.engine.tensor_parallel_size for each in small] == [4, 8]
    assert re.search(r"leaves no memory.* What does: --tensor-parallel-size 4", small[0].provenance["left out"])
    assert not any("left out" in each.provenance for each in (*found, small[1]))
    with pytest.raises(IncompatibleError, match="leaves no memory"):
        profiles_for(MODEL, "rtx4090", sizes(1, 2), SETTINGS)


def test_ranks_are_tried_with_each_size() -> None:
    """Every number of data-parallel ranks goes with every size; servers that do not start are left out."""
    wanted = {**sizes(1, 2), "data_parallel_size": (1, 2)}
    found = profiles_for("Qwen/Qwen3-30B-A3B", "l40s", wanted, SETTINGS)
    groups = [(each.engine.tensor_parallel_size, each.engine.data_parallel_size) for each in found]
    assert groups == [(1, 2), (2, 1), (2, 2)]
    assert [each.engine.gpus for each in found] == [2, 2, 4]
    assert "2 data-parallel ranks" in dict(found[0].facts())["GPU"]


def test_a_server_that_needs_more_gpus_for_its_context_says_what_fewer_take() -> None:
    """Where the whole context does not fit on one GPU, the profile has two and names the context of one."""
    found = profile_for("Qwen/Qwen3-8B", "rtx4090", {})
    assert found.engine.tensor_parallel_size == 2
    gpus, context = found.provenance["fewer GPUs"].split(" it starts at --max-model-len ")
    assert gpus == "with 1 GPU"
    one = profile_for("Qwen/Qwen3-8B", "rtx4090", {"max_model_len": int(context)})
    assert one.engine.tensor_parallel_size == 1
    assert "fewer GPUs" not in one.provenance
    assert "fewer GPUs" not in profile_for("meta-llama/Llama-3.1-70B-Instruct", "h100-80gb", {}).provenance


def test_a_fleet_whose_ranks_start_on_no_server_is_told_what_would() -> None:
    """A kind whose KV cache a slot of the largest rank leaves too small is left out; where all are, that is said."""
    small, large = (profile_for(MODEL, "l4", {"tensor_parallel_size": n}) for n in (4, 8))
    fleet = Workload([Adapter("a", 8, 0.05), Adapter("b", 32, 0.05)])
    with pytest.raises(IncompatibleError, match=r"one adapter of rank 32, .* What would start: --max-model-len \d+"):
        recommend(fleet, small, seed=0)
    assert starting(fleet, [small, large]) == [large]
    assert starting(fleet.subset((0,)), [small, large]) == [small, large]


def test_a_server_has_as_many_gpus_as_the_fleet_s_largest_rank_needs() -> None:
    """A slot of rank 32 leaves four GPUs too small a KV cache: eight are taken, or offered if four are asked for."""
    model = ("Qwen/Qwen3-32B", "l4")
    assert profile_for(*model, {}).engine.tensor_parallel_size == 4
    for rank in (17, 32):
        assert profile_for(*model, {}, rank).engine.tensor_parallel_size == 8
        assert [each.engine.tensor_parallel_size for each in profiles_for(*model, {}, {}, rank)] == [8]
    with pytest.raises(IncompatibleError, match=r"start: --max-model-len \d+ \(.*\) or --tensor-parallel-size 8\.$"):
        profile_for(*model, {"tensor_parallel_size": 4}, 32)
    with pytest.raises(IncompatibleError, match=r"start: a GPU with more memory or --tensor-parallel-size 4\.$"):
        profile_for("meta-llama/Llama-3.1-70B-Instruct", "h100-80gb", {"tensor_parallel_size": 2}, 64)


@pytest.mark.parametrize(("mean_itl_ms", "best"), [(100.0, 1), (15.0, 2)])
def test_the_cheapest_size_that_keeps_the_goal_is_planned(mean_itl_ms: float, best: int) -> None:
    """A wide limit is kept by the smallest server, a tight one by as many GPUs as it takes and no more."""
    fleet = Workload(
        [Adapter("a", 16, 0.2), Adapter("b", 16, 0.2)],
        input_tokens=Lengths.constant(500),
        output_tokens=Lengths.constant(100),
    )
    kinds = profiles_for(MODEL, "h200", sizes(1, 2, 4), SETTINGS)
    plan = recommend(fleet, kinds, slo=f"mean_itl_ms={mean_itl_ms}", seed=0)
    assert {item.profile.engine.tensor_parallel_size for item in plan.bins} == {best}
    assert len(plan.bins) == 1
