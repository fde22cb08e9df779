"""Systems whose placement a solver computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from packer import Adapter, Cluster, Workload
from packer.errors import ValidationError
from packer.planning import placing
from packer.profile import Profile


def test_reasons_of_a_system_without_a_plan_are_told_apart(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sees where one reason ends and the next begins."""
    none = SimpleNamespace(unplaced=(0,), reasons=("1 adapter has no place", "server 0 does not start"))
    monkeypatch.setattr(placing, "solve", lambda *_args, **_options: none)
    said = r"a plan on 1 server, got none: 1 adapter has no place; server 0 does not start\.$"
    with pytest.raises(ValidationError, match=said):
        placing.BySolver("dlora").place(Workload([Adapter("a", 8, 1.0)]), Cluster.of(server, 1, max_loras=4), 0)
