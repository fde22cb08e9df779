"""What one running server answers."""

from __future__ import annotations

import pytest

from packer.errors import LiveError
from packer.io.web import Address
from packer.live import host
from packer.live.fleet_file import Host, StepLimits


@pytest.mark.parametrize("before", range(host.ERROR_TEXT - 20, host.ERROR_TEXT + 1))
def test_a_long_error_shows_no_part_of_the_key(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers repeat the key; it is masked before an error is cut to its length."""
    text = f"{'.' * before}sesame-4711"
    monkeypatch.setattr(host, "get", lambda *_: (401, text))
    server = host.RunningServer(Host("http://h"), Address("http://h", "Bearer sesame-4711"), StepLimits())
    with pytest.raises(LiveError) as caught:
        server.metrics()
    assert "s" not in str(caught.value).partition("401")[2]
