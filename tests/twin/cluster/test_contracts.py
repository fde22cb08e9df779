"""Every router of packer keeps the contract that plug-ins are held to."""

from __future__ import annotations

import pytest

from packer import registry
from packer.testing.contracts import RouterContract
from packer.twin.cluster.routers.base import Router


class TestBuiltIns(RouterContract):
    """The shipped suite, once for each router."""

    @pytest.fixture(params=registry.names("router"))
    def router(self, request: pytest.FixtureRequest) -> Router:
        """The router under test."""
        made: Router = registry.make("router", request.param)
        return made
