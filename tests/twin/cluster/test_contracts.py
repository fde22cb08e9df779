"""Every router and cache policy of packer keeps the contract that plug-ins are held to."""

from __future__ import annotations

import pytest

from packer import registry
from packer.testing.contracts import CachePolicyContract, RouterContract
from packer.twin.cluster.caching import CachePolicy
from packer.twin.cluster.routers.base import Router


class TestRouters(RouterContract):
    """The shipped suite, once for each router."""

    @pytest.fixture(params=registry.names("router"))
    def router(self, request: pytest.FixtureRequest) -> Router:
        """The router under test."""
        made: Router = registry.make("router", request.param)
        return made


class TestCachePolicies(CachePolicyContract):
    """The shipped suite, once for each cache policy."""

    @pytest.fixture(params=registry.names("cache"))
    def policy(self, request: pytest.FixtureRequest) -> CachePolicy:
        """The policy under test."""
        made: CachePolicy = registry.make("cache", request.param)
        return made


def test_adapters_of_the_suite_of_caches_share_servers() -> None:
    """The first adapter is on all servers, each other one on two: a policy sees adapters that it has and has not."""
    run = CachePolicyContract().run(registry.make("cache", registry.names("cache")[0]), 1.0)
    assert run.cluster is not None
    held = [name for placed in run.cluster.placement or () for name in placed]
    assert [held.count(f"a{i}") for i in range(12)] == [3] + [2] * 11
