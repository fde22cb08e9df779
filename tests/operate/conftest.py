"""A server and a fleet for plans to deploy."""

from __future__ import annotations

from dataclasses import replace

import pytest

import packer
from packer import Adapter, Workload
from packer.profile import Profile


@pytest.fixture(scope="session")
def server() -> Profile:
    """A shipped server with a price."""
    profile = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    return replace(profile, gpu=replace(profile.gpu, price_per_hour=2.5))


@pytest.fixture(scope="session")
def fleet() -> Workload:
    """Forty adapters that fill two servers."""
    return Workload([Adapter(f"a{k}", 16 if k % 4 else 32, 0.9) for k in range(40)])
