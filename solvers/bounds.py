"""`bounds`: greedy's plan and how many GPUs a fleet needs at the least."""

from __future__ import annotations

from packer.solvers.columns.exact import Exact


class Bounds(Exact):
    """Greedy's plan with the bound of few prices: a quick answer to "how good is it at least?".

    Where every bin can be evaluated, it is a plan of the fewest GPUs, and the bound is proven.
    """

    name = "bounds"
    start_share = 1.0
    bound_alone = True
