"""Split a search by base model, and by kind of GPU for solvers that support one kind only.

Adapters of different models never share a server, so each model is a problem of its own, except that models share the
available GPUs. If the number of GPUs is free, the models take what they need one after the other. If it is fixed, or
the solver spreads over all that are given, the GPUs are divided among the models so that the objective gains most. A
solver for one kind of GPU plans with each kind alone, and the best plan is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from packer import checks, registry
from packer.bin import Bin
from packer.errors import IncompatibleError, PluginError, ValidationError, shown
from packer.gpu import base_model, serving
from packer.moves import aligned, moves_of
from packer.objectives.gpus import Gpus
from packer.plan import Moves
from packer.public import check_fields
from packer.solvers.base import Problem, Solution, Solver, used_gpus
from packer.solvers.greedy.solver import Greedy
from packer.solvers.limit import within_limit

MOST_DIVISIONS = 24  # Most (spare GPUs × models) with every division evaluated; beyond, by marginal gain.

Rank = tuple[float, ...]


@dataclass(frozen=True)
class Part:
    """The adapters of one base model, as indices in the fleet, and the problem to place them."""

    adapters: tuple[int, ...]
    problem: Problem
    old: tuple[int, ...] = ()  # Indices of the running servers of this model.


def parts(problem: Problem) -> list[Part]:
    """One part for each base model of the fleet."""
    fleet = problem.workload
    offered = serving(fleet, problem.profiles)
    if len(offered) == 1:
        (profiles,) = offered.values()
        everyone = tuple(range(len(fleet)))
        return [Part(everyone, replace(problem, profiles=profiles), tuple(range(len(problem.old_bins))))]
    found = []
    for model, profiles in offered.items():
        index, mine = fleet.of_model(model)
        number = {i: k for k, i in enumerate(index)}
        old = [k for k, item in enumerate(problem.old_bins) if set(item.adapters) <= number.keys()]
        bins = tuple(item for k in old if (item := problem.old_bins[k].renumbered(number)) is not None)
        aim = problem.objective.anchored(bins)
        own = replace(problem, workload=mine, profiles=profiles, objective=aim, old_bins=bins)
        found.append(Part(index, own, tuple(old)))
    return sorted(found, key=_urgency)


def _urgency(part: Part) -> tuple[int, int, float]:
    """Order in which models take GPUs: first models whose kinds are all limited, then by number of kinds, then load."""
    problem = part.problem
    other = any(profile.gpu.name not in problem.stock for profile in problem.profiles)
    return int(other), len(problem.profiles), -problem.workload.offered_tok_s


def is_whole(problem: Problem) -> bool:
    """Whether a solver takes the problem as it is: one base model, one kind of server on single GPUs."""
    one = len(problem.profiles) == 1 and problem.profile.engine.gpus == 1
    return one and len(problem.workload.models) < 2 and not problem.stock


def supports(problem: Problem, solver: Solver) -> str | None:
    """Why a solver can't take the problem, split by model and kind of server if needed; None if it can."""
    for part in parts(problem):
        kinds = _kinds(part.problem, solver)
        reasons = [_searching(problem, each, solver).supports(each) for each in kinds]
        if None not in reasons:
            return reasons[0]
    return None


def fitting(problem: Problem, given: str | Solver) -> Solver:
    """The solver given, by name or as an object. Raises `IncompatibleError`: it or the objective can't be used here;
    `ValidationError`: the name of a strategy, or a limit of the objective, breaks a rule."""
    solver: Solver = registry.load("solver", given)() if isinstance(given, str) else given
    checks.instance("the solver", solver, Solver, "packer.registry.load")
    aim, name = problem.objective, solver.name
    for kind, own in (("objective", aim.name), ("solver", name), ("predictor", problem.evaluator.name)):
        checks.name(f"the name of the {kind}", own)
    for key, most in aim.limits.items():
        checks.real(f"{key}, a limit of the objective {aim.name!r},", most, low=0.0)
    if aim.spare and (len(problem.profiles) > 1 or aim.fixed_gpus):
        rule = "A spare GPU is planned for one kind of server, where the number of GPUs is free"
        raise IncompatibleError(f"{rule}: --spare 0 plans without one.")
    if (reason := aim.supports(problem.profiles)) is not None:
        raise IncompatibleError(f"The objective {aim.name!r} can't be used here: {reason}.")
    if (reason := supports(problem, solver)) is not None:
        raise IncompatibleError(f"The solver {name!r} can't take this problem (objective {aim.name!r}): {reason}.")
    return solver


def _checked(solver: Solver, found: object) -> Solution:
    """Check that a solver, which may come from another package, returned a `Solution`."""
    if not isinstance(found, Solution):
        raise PluginError(f"Expected a Solution of {type(solver).__qualname__}.solve, got {shown(found)}.")
    try:
        check_fields(found)
    except ValidationError as error:
        raise PluginError(f"The solver {solver.name!r}: {error}") from None
    return found


def solved(problem: Problem, solver: Solver) -> Solution:
    """The solution that a solver finds for a problem that it `supports`. The lowest price may take more GPUs than there
    are: then the plan of greedy for the fewest GPUs, if that is better."""
    limited = len(problem.profiles) > 1 and problem.objective.minimises == "price" and problem.max_gpus is not None
    late = problem.time_limit_s is not None  # the search may leave no time
    dear = _with_fewest(problem.with_share(0.5), solver) if limited and late else None
    found = _solved(problem, solver)
    if not limited or not found.unplaced:
        return found
    return min((found, dear or _with_fewest(problem, solver)), key=lambda one: rank(problem, one))


def _with_fewest(problem: Problem, solver: Solver) -> Solution:
    """Greedy's plan on the fewest GPUs, which has no bound on the price; with its moves if `solver` replans."""
    found = _solved(replace(problem, objective=Gpus().within(problem.objective.goal), old_bins=()), Greedy())
    found = replace(found, lower_bound=None, bound_source="", proven=False)
    if solver.name == "replan" and not found.unplaced:
        bins = tuple(aligned(problem.old_bins, found.bins))
        found = replace(found, bins=bins, moves=moves_of(problem.old_bins, bins))
    return found


def _solved(problem: Problem, solver: Solver) -> Solution:
    if is_whole(problem) or getattr(solver, "joint", False):
        return _checked(solver, solver.solve(problem))
    found = parts(problem)
    if _spreads(problem, solver):
        return _divided(problem, found, solver)
    stock = dict(problem.stock)
    solutions = []
    most = problem.max_gpus if len(found) == 1 else None  # models share the limit
    for k, part in enumerate(found):
        timed = part.problem.with_share(1.0 / (len(found) - k))
        one = _of_kinds(problem, replace(timed, max_gpus=most, stock=dict(stock)), solver)
        for name, count in used_gpus(one.bins).items():
            if name in stock:
                stock[name] -= count
        solutions.append(one)
    return within_limit(problem, merged(problem, found, solutions))


def _spreads(problem: Problem, solver: Solver) -> bool:
    """Whether the number of servers is given: the objective fixes it, or the solver uses all GPUs of the limit."""
    limited = problem.max_gpus is not None
    return limited and (problem.objective.fixed_gpus or getattr(solver, "spreads", False))


def merged(problem: Problem, found: Sequence[Part], solutions: Sequence[Solution]) -> Solution:
    """Join the solutions of the parts; the bounds add up where GPUs or prices are minimised."""
    bins: list[Bin] = []
    unplaced: list[int] = []
    reasons: list[str] = []
    servers: list[int | None] = []
    moved: list[int] = []
    for part, one in zip(found, solutions, strict=True):
        index = np.array(part.adapters, dtype=np.int64)
        bins += [item.under(part.adapters) for item in one.bins]
        unplaced += index[list(one.unplaced)].tolist()
        model = part.problem.workload.models
        reasons += [f"{model[0]}: {text}" if len(found) > 1 and model else text for text in one.reasons]
        changes = one.moves or Moves((), (None,) * len(one.bins))
        moved += index[list(changes.adapters)].tolist()
        servers += [None if k is None else part.old[k] for k in changes.servers]
    order = list(range(len(bins)))
    if problem.old_bins:  # servers keep their numbers, new ones come at the end
        order.sort(key=lambda k: (len(problem.old_bins) if (old := servers[k]) is None else old, k))
    continues = any(one.moves is not None for one in solutions)
    bounds = [one.lower_bound for one in solutions if one.lower_bound is not None]
    additive = problem.objective.minimises in ("gpus", "price") and len(bounds) == len(solutions)
    bound = sum(bounds) if additive else None
    return Solution(
        tuple(bins[k] for k in order), tuple(sorted(unplaced)), tuple(reasons), lower_bound=bound,
        bound_source=" + ".join(dict.fromkeys(one.bound_source for one in solutions)) if bound else "",
        details=_details(found, solutions), proven=bound is not None and all(one.proven for one in solutions),
        moves=Moves(tuple(sorted(moved)), tuple(servers[k] for k in order)) if continues else None,
    )  # fmt: skip


def _details(found: Sequence[Part], solutions: Sequence[Solution]) -> dict[str, object]:
    if len(found) == 1:
        return dict(solutions[0].details)
    return {
        str(part.problem.workload.models[0]): dict(one.details)
        for part, one in zip(found, solutions, strict=True)
        if one.details
    }


def _kinds(problem: Problem, solver: Solver) -> list[Problem]:
    """The problem itself, or one problem for each kind of server if the solver supports one kind only; both with
    replicas for a solver whose mix may then be dearer than one kind."""
    if len(problem.profiles) == 1:
        return [problem]
    alone = [replace(problem, profiles=(profile,)) for profile in problem.profiles]
    if solver.supports(problem) is not None:
        return alone
    return [problem, *(alone if getattr(solver, "compared", False) and problem.max_replicas != 1 else [])]


def _searching(whole: Problem, part: Problem, solver: Solver) -> Solver:
    """The solver, but greedy instead of replan for a model without running servers."""
    return Greedy() if solver.name == "replan" and not part.old_bins and whole.old_bins else solver


def _of_kinds(whole: Problem, problem: Problem, solver: Solver) -> Solution:
    """The solver's solution for a part, on the best single kind of server if it supports one kind only."""
    search = _searching(whole, problem, solver)
    if search is not solver:
        problem = replace(problem, objective=Gpus())
    options, kinds = [], _kinds(problem, solver)
    for k, kind in enumerate(kinds):
        # Each kind gets an equal part of the time that is left.
        each = kind.with_share(1.0 / (len(kinds) - k))
        tensor = 1 if len(each.profiles) > 1 else each.profile.engine.gpus
        servers = _spreads(each, search)
        if servers and each.max_gpus is not None:
            if each.max_gpus < tensor:
                continue
            at_hand = max(tensor, each.stock.get(each.profile.gpu.name, each.max_gpus))
            given = each.max_gpus if len(each.profiles) > 1 else min(each.max_gpus, at_hand)
            # The limit counts GPUs; a solver that spreads takes it as a number of servers.
            each = replace(each, max_gpus=given // tensor)
        if search.supports(each) is None:
            options.append(within_limit(each, _checked(search, search.solve(each)), servers=servers))
    if not options:
        rule = f"The solver {solver.name!r} can't take {problem.max_gpus} GPUs for servers on more"
        raise IncompatibleError(f"{rule} of them each.")
    best = min(options, key=lambda one: rank(problem, one))
    if len(kinds) == 1:
        return best
    # No bound: with other kinds of server, or a mix of kinds, less might be enough.
    return replace(best, lower_bound=None, bound_source="", proven=False)


def rank(problem: Problem, found: Solution) -> Rank:
    """Smaller is better: unplaced load, tok/s; servers that the objective refuses; the objective's key."""
    if not found.bins:
        return (problem.workload.offered_tok_s, np.inf)
    evaluations = problem.evaluator.evaluate(problem.workload, found.bins)
    left = float(problem.workload.offered_tok_s_by_adapter[list(found.unplaced)].sum())
    refused = float((~problem.objective.holds(evaluations)).sum())
    return (left, refused, *problem.objective.key(problem.workload, found.bins, evaluations))


def _division_rank(problem: Problem, found: Solution) -> Rank:
    """As `rank`, of a division of the GPUs given: an objective that does not fix their number would take few of them,
    so that more used GPUs come first, and last the time of a request, ms: first token and 100 more."""
    order = rank(problem, found)
    if problem.objective.fixed_gpus or not found.bins:
        return order
    rows = problem.evaluator.evaluate(problem.workload, found.bins)
    rates = [float(item.rates(problem.workload).sum()) for item in found.bins]
    time_ms = np.nan_to_num(rows.mean_ttft_ms + 100.0 * rows.mean_itl_ms, nan=np.inf)
    time_ms[rows.idle] = 0.0
    used = sum(item.gpus for item in found.bins)
    return (*order[:2], -float(used), *order[2:], float(np.average(time_ms, weights=rates)))


def _divided(problem: Problem, found: Sequence[Part], solver: Solver) -> Solution:
    """Divide the given GPUs among the models. Evaluate every division if there are few; else give one GPU after the
    other to the model that gains most, up to a server for each adapter or replica. Servers beyond the GPUs at hand,
    which models share, are cut. Searches get equal parts of the time; once it is over, load decides."""
    total, cards = problem.max_gpus or len(found), {profile.gpu.name for profile in problem.profiles}
    if cards <= problem.stock.keys():
        total = min(total, sum(problem.stock[card] for card in cards))
    plans: dict[tuple[int, int], Solution] = {}

    def at(counts: Sequence[int]) -> Solution:
        for m, n in enumerate(counts):
            if (m, n) not in plans:
                # The time left is divided among the searches that are left.
                timed = found[m].problem.with_share(1.0 / max(1, searches - len(plans)))
                plans[m, n] = _of_kinds(problem, replace(timed, max_gpus=n), solver)
        whole = merged(problem, found, [plans[m, n] for m, n in enumerate(counts)])
        return within_limit(problem, whole, servers=False)

    searches = 1
    if len(found) == 1:
        return at([total])
    # One equal share of the time stays for the divisions.
    timed = (part.problem.with_share(1.0 / (len(found) + 1 - k)) for k, part in enumerate(found))
    free = (replace(each, objective=Gpus(), max_gpus=None, old_bins=()) for each in timed)
    fewest = [max(1, sum(item.gpus for item in Greedy().solve(each).bins)) for each in free]
    if sum(fewest) > total:
        names = [base_model(part.problem.profile.model.name) for part in found]
        needs = ", ".join(f"{n} for {name}" for n, name in zip(fewest, names, strict=True))
        if total < len(found):
            reason = f"{len(found)} base models need at least as many GPUs ({needs})"
            return Solution((), tuple(range(len(problem.workload))), (reason,))
        fewest = [max(1, n * total // sum(fewest)) for n in fewest]
        # At least one GPU for each model may make them more than the GPUs at hand.
        while sum(fewest) > total:
            fewest[fewest.index(max(fewest))] -= 1
    sizes = (max(profile.engine.gpus for profile in part.problem.profiles) for part in found)
    useful = sum(len(part.adapters) * size for part, size in zip(found, sizes, strict=True))
    spare = max(0, min(total, problem.max_replicas * useful) - sum(fewest))
    load = [part.problem.workload.offered_tok_s for part in found]

    def fullest(counts: Sequence[int]) -> float:
        return max(each / n for each, n in zip(load, counts, strict=True))

    if spare * len(found) <= MOST_DIVISIONS:
        searches = (spare + 1) * len(found)
        options = [[n + k for n, k in zip(fewest, more, strict=True)] for more in _shares(spare, len(found))]
        made = [at(each) for each in sorted(options, key=fullest) if not (plans and problem.out_of_time())]
        return min(made, key=lambda one: _division_rank(problem, one))
    searches, counts = 2 * len(found) + spare - 1, fewest
    for _ in range(spare):
        options = [[n + (k == m) for k, n in enumerate(counts)] for m in range(len(found))]
        late = problem.out_of_time()
        counts = min(options, key=lambda each: (fullest(each),) if late else _division_rank(problem, at(each)))
    return at(counts)


def _shares(spare: int, count: int) -> list[list[int]]:
    """Every way to distribute `spare` GPUs over `count` models."""
    # Stars and bars: the gaps between the bars are what the models get.
    ends = spare + count - 1
    return [
        [b - a - 1 for a, b in zip((-1, *bars), (*bars, ends), strict=True)]
        for bars in combinations(range(ends), count - 1)
    ]
