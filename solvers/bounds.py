"""`bounds`: greedy's plan and a lower bound on the number of GPUs that a fleet needs."""

from __future__ import annotations

from packer.solvers.columns.exact import Exact


class Bounds(Exact):
    """Greedy's plan with a bound from a few prices: a quick answer to "how far is it from the optimum, at most?".

    If there are few enough bins to evaluate each one, the plan has the fewest GPUs and the bound is proven.
    """

    name = "bounds"
    start_share = 1.0
    bound_alone = True
