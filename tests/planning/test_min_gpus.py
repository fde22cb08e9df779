"""A plan on more GPUs than the goal takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import packer
from packer import Adapter, RequestTrace, Workload
from packer.errors import IncompatibleError, ValidationError
from packer.gpu import GpuKind
from packer.planning.explore import Frontier
from packer.profile import Profile


def test_a_plan_has_at_least_the_gpus_that_are_asked_for(server: Profile) -> None:
    """With `min_gpus` the plan has the figures that the plan without it shows for so many GPUs, also beside a running
    plan on fewer; no more than the goal takes change nothing."""
    fleet = Workload([Adapter(f"a{k}", 8, 1.0) for k in range(12)])
    free = packer.recommend(fleet, server)
    more = packer.recommend(fleet, server, min_gpus=free.n_gpus + 1)
    assert (more.n_gpus, more.verified) == (free.n_gpus + 1, True)
    told, own = ([row for row in each.frontier if row["n_gpus"] == more.n_gpus] for each in (free, more))
    assert told == own
    assert len(own) == 1
    assert packer.recommend(fleet, server, min_gpus=more.n_gpus, old_plan=free).n_gpus == more.n_gpus
    assert packer.recommend(fleet, server, min_gpus=free.n_gpus).bins == free.bins
    assert packer.recommend(fleet, server, min_gpus=free.n_gpus + 2).statistics["weaker_goals"] == {}


def test_more_gpus_than_needed_share_a_hot_adapter(server: Profile) -> None:
    """Else the server that has it alone would have no more room, however many GPUs are added."""
    fleet = Workload([Adapter(f"a{k}", 8, 38.0 / (k + 1) ** 2) for k in range(12)])
    free = packer.recommend(fleet, server)
    more = packer.recommend(fleet, server, min_gpus=free.n_gpus + 1)
    assert sum(0 in item.adapters for item in free.bins) == 1
    assert sum(0 in item.adapters for item in more.bins) == 2
    least, now = (min(room.headroom or 0.0 for room in each.rooms) for each in (free, more))
    assert now > 1.25 * least


@pytest.mark.parametrize("verify", [True, False])
def test_no_more_gpus_than_needed_change_nothing(server: Profile, verify: bool) -> None:
    """As many GPUs as the goal takes are no more than it takes, also where the load alone takes fewer: the plan had
    other servers with `min_gpus`."""
    fleet = Workload([Adapter(f"a{k}", 8, 19.0 / (k + 1) ** 2) for k in range(12)]).held_to("p95_ttft_ms=150")
    free = packer.recommend(fleet, server, verify=verify)
    assert Frontier(fleet, server).least() < free.n_gpus
    assert packer.recommend(fleet, server, verify=verify, min_gpus=free.n_gpus).bins == free.bins


@pytest.mark.parametrize("verify", [True, False])
def test_a_single_adapter_has_as_many_gpus_as_are_asked_for(server: Profile, verify: bool) -> None:
    """Its parts share them, also where plans are not verified, which had no more GPUs than the goal takes."""
    plan = packer.recommend(Workload([Adapter("a", 8, 1.0)]), server, min_gpus=3, verify=verify)
    assert (plan.n_gpus, plan.status.value) == (3, "feasible")


def test_more_gpus_than_needed_share_a_hot_adapter_also_where_one_may_be_lost(server: Profile) -> None:
    """A hot adapter was alone on one of more GPUs with a spare one, with less room than on fewer."""
    fleet = Workload([Adapter(f"a{k}", 8, 38.0 / (k + 1) ** 2) for k in range(12)])
    free = packer.recommend(fleet, server, spare=1)
    more = packer.recommend(fleet, server, spare=1, min_gpus=free.n_gpus + 1)
    assert (more.n_gpus, more.spare, more.verified) == (free.n_gpus + 1, 1, True)
    least, now = (min(room.headroom or 0.0 for room in each.rooms) for each in (free, more))
    assert now > 1.25 * least


def test_a_plan_says_why_it_has_fewer_gpus_than_are_asked_for(server: Profile) -> None:
    """Adapters that may not be split take no more GPUs than there are of them."""
    fleet = Workload([Adapter("a", 8, 1.0)])
    said = "--min-gpus asks for more GPUs. The adapters take at most 1 GPU:"
    assert packer.recommend(fleet, server, min_gpus=3, max_replicas=1).reasons == (f"{said} --max-replicas 1.",)
    each = np.zeros(1, np.int64)
    replayed = fleet.replaying(RequestTrace(np.ones(1), each, each + 100, each + 100))
    assert f"{said} a replayed trace splits none." in packer.recommend(replayed, server, min_gpus=3).reasons
    assert not any("--min-gpus" in each for each in packer.recommend(fleet, server, min_gpus=3).reasons)


def test_so_many_gpus_must_be_at_hand_and_of_one_kind(server: Profile) -> None:
    """More than whole servers have, or several kinds of server, are refused, as what they are."""
    fleet = Workload([Adapter("a", 8, 0.1)])
    with pytest.raises(ValidationError, match=r"min_gpus to be a whole number in \[1, 2\], got 3"):
        packer.recommend(fleet, server, min_gpus=3, max_gpus=2)
    with pytest.raises(ValidationError, match=r"min_gpus to be a whole number in \[1, 2\], got 3"):
        packer.recommend(fleet, GpuKind(server, available=2), min_gpus=3)
    pairs = replace(server, engine=replace(server.engine, tensor_parallel_size=2))
    with pytest.raises(ValidationError, match=r"min_gpus to be a whole number in \[1, 2\], got 3"):
        packer.recommend(fleet, pairs, min_gpus=3, max_gpus=3)
    other = GpuKind(replace(server, gpu=replace(server.gpu, name="other")), available=1)
    with pytest.raises(IncompatibleError, match=r"--min-gpus goes with one kind"):
        packer.recommend(fleet, [GpuKind(server), other], min_gpus=2)
