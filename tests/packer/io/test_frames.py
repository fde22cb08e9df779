"""Polars is imported when it is first used, and not before."""

from __future__ import annotations

import subprocess
import sys


def test_polars_comes_with_its_first_attribute() -> None:
    """The name alone imports nothing; an attribute is the real one."""
    program = (
        "import sys; from packer.io.frames import pl; assert 'polars' not in sys.modules; "
        "kind = pl.Int64; import polars; assert kind is polars.Int64"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
