"""Kinds of server that a plan may use: profile, price, and number of available GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from packer import checks
from packer.errors import IncompatibleError, ValidationError
from packer.profile import ModelSpec, Profile
from packer.public import checked
from packer.workload import Workload


@dataclass(frozen=True)
class GpuKind:
    """A kind of server.

    `profile`: profile of the server; a tensor-parallel group is one server on several GPUs.
    `price_per_hour`: price of one server with all of its GPUs; None takes the profile's.
    `available`: number of available GPUs; None: unlimited. Kinds with the same `profile.gpu.name` share them.
    """

    profile: Profile
    price_per_hour: float | None = None
    available: int | None = None

    @checked
    def __post_init__(self) -> None:
        checks.instance("a server", self.profile, Profile, "packer.load_profile(NAME)")
        if self.price_per_hour is not None:
            price = checks.real(f"the price of {self.profile.name}", self.price_per_hour, low=0.0, high=1e9)
            known = {key: said for key, said in self.profile.provenance.items() if key != "price"}
            gpu = replace(self.profile.gpu, price_per_hour=price)
            object.__setattr__(self, "profile", replace(self.profile, gpu=gpu, provenance=known))
        if self.available is not None:
            checks.integer(f"the GPUs at hand for {self.profile.name}", self.available, low=0)


Kinds = Profile | GpuKind | Sequence[Profile | GpuKind]  # Types in which planning accepts the kinds of server.


def kinds_of(given: Kinds) -> tuple[GpuKind, ...]:
    """The kinds in the order given, without repeated profiles. Raises `ValidationError`: there is none, or one profile
    has two numbers of GPUs at hand."""
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not several:
        raise ValidationError("Expected at least one profile, got none.")
    kinds: dict[Profile, GpuKind] = {}
    for each in several:
        kind = each if isinstance(each, GpuKind) else GpuKind(each)
        known = kinds.setdefault(kind.profile, kind)
        if known.available != kind.available:
            rule = f"Expected one number of GPUs at hand for {kind.profile.name}, got"
            raise ValidationError(f"{rule} {known.available} and {kind.available}.")
    return tuple(kinds.values())


def stock_of(kinds: Iterable[GpuKind]) -> dict[str, int]:
    """Available GPUs by name, without unlimited ones; raises `ValidationError` if kinds with one GPU differ."""
    stock: dict[str, int] = {}
    for kind in kinds:
        name = kind.profile.gpu.name
        if kind.available is not None and stock.setdefault(name, kind.available) != kind.available:
            rule = f"Expected one number of GPUs at hand for {name}, got {stock[name]} and {kind.available}."
            raise ValidationError(rule)
    return stock


def base_model(name: str) -> str:
    """A model's name without its owner and in lower case, by which adapters and profiles are matched."""
    return name.rstrip("/").rpartition("/")[2].lower()


def serves(spec: ModelSpec, model: str) -> bool:
    """Whether a profile's model serves adapters of the base model `model`, by its name or its repository."""
    return base_model(model) in {base_model(spec.name), base_model(spec.repository or spec.name)}


def same_model(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether two profiles have the same base model, by its name or its repository."""
    return serves(one, other.name) or serves(one, other.repository or other.name)


def model_names(profiles: Iterable[Profile]) -> list[str]:
    """The names of the base models of profiles, one for each model."""
    found: list[ModelSpec] = []
    for profile in profiles:
        if not any(same_model(profile.model, each) for each in found):
            found.append(profile.model)
    return sorted(each.name for each in found)


def serving(workload: Workload, profiles: Sequence[Profile]) -> dict[str | None, tuple[Profile, ...]]:
    """The profiles that serve each base model of a fleet, by the name that the adapters use for the model. If the
    adapters name no model, the key is None and all profiles must serve the same model. Raises `IncompatibleError`: no
    profile serves a model, or the profiles serve several and the adapters name none."""
    offered = model_names(profiles)
    if not workload.models:
        if len(offered) > 1:
            rule = f"Expected profiles of one base model, got {', '.join(offered)}: with several,"
            raise IncompatibleError(f"{rule} every adapter names its own (column model).")
        return {None: tuple(profiles)}
    found: dict[str | None, tuple[Profile, ...]] = {}
    for model in workload.models:
        found[model] = tuple(each for each in profiles if serves(each.model, model))
        if not found[model]:
            raise _unserved(model, *offered)
    return found


def _unserved(model: str, *offered: str) -> IncompatibleError:
    rule = f"Expected a profile that serves the base model {model!r}"
    return IncompatibleError(f"{rule}, got profiles of {', '.join(offered)}.")


def check_serves(profile: Profile, models: Iterable[str]) -> None:
    """Raise `IncompatibleError` unless the profile serves adapters of each of these base models."""
    for model in models:
        if not serves(profile.model, model):
            raise _unserved(model, profile.model.name)


def check_one_server(workload: Workload, profile: Profile) -> None:
    """Check that one server can serve the whole fleet, by the base models that the adapters name. Raises
    `ValidationError`: they name several; `IncompatibleError`: the profile does not serve theirs."""
    if len(workload.models) > 1:
        rule = f"Expected adapters of one base model for one server, got {', '.join(workload.models)}:"
        raise ValidationError(f"{rule} take those of one.")
    check_serves(profile, workload.models)
