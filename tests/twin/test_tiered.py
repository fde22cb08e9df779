"""A kernel can be used before it is compiled, with the same results, and is compiled meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from packer.twin.bursts import _relax
from packer.twin.compile_ahead import interpreted

PROGRAM = """
import numpy as np
from packer.twin.bursts import _relax
from packer.twin.compile_ahead import COMPILER
from packer.twin.compile_ahead import Tiered
tiered = Tiered(_relax, {})
for _ in range(2):
    values = np.ones(3)
    tiered(values, 0.5, short=True)
    print(values.tolist(), len(_relax.signatures), COMPILER.has(_relax))
values = np.ones(3)
tiered(values, 0.5, short=False)
print(values.tolist(), len(_relax.signatures), sum(_relax.stats.cache_hits.values()))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="nothing is compiled elsewhere on a single core")
def test_short_calls_do_not_wait_and_others_use_what_was_compiled_elsewhere(
    compiled_anew: Callable[[str], list[str]],
) -> None:
    """Three calls: two interpreted, one with the code of the other process."""
    assert compiled_anew(PROGRAM) == [
        "[1.0, 1.5, 1.75] 0 True",
        "[1.0, 1.5, 1.75] 0 True",
        "[1.0, 1.5, 1.75] 1 1",
    ]


def test_an_interpreted_kernel_is_the_same_function() -> None:
    """Interpreted, a kernel does what it does compiled."""
    values = np.ones(2)
    interpreted(_relax, {})(values, 0.5)
    assert values.tolist() == [1.0, 1.5]
