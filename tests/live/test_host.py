"""What one running server answers."""

from __future__ import annotations

import pytest

from packer.errors import LiveError
from packer.io.web import Address
from packer.live import host
from packer.live.fleet_file import Host, StepLimits


@pytest.mark.parametrize("status", [401, 0])
@pytest.mark.parametrize("before", range(host.ERROR_TEXT - 60, host.ERROR_TEXT, 5))
def test_a_long_error_shows_no_part_of_the_key(before: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers repeat the key; it is masked before an error is cut to its length."""
    key = "sesame-4711" * 4
    monkeypatch.setattr(host, "get", lambda *_: (status, "." * before + key))
    server = host.RunningServer(Host("http://h"), Address("http://h", f"Bearer {key}"), StepLimits())
    with pytest.raises(LiveError) as caught:
        server.metrics()
    assert "s" not in str(caught.value).partition("/metrics:")[2]
