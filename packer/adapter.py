"""One LoRA adapter, its rank and its traffic."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks
from packer.lengths import MAX_TOKENS, Lengths
from packer.public import checked
from packer.sessions import Sessions

MAX_RANK = checks.SLOT_RANKS[-1]
MIN_RATE = 1e-12  # Smallest request rate, req/s: below it, times between requests overflow.
MAX_RATE = 1e6  # Largest request rate that is accepted, req/s. Rates that are scaled may be outside of the two.
IDLE_RATE = 1e-9  # Rate, req/s, that replaces a rate of 0: the adapter is served, and gets no request in years.
MAX_PRIORITY = 10**6
A_LENGTH = "packer.Lengths.gamma(mean=300, cv=1.1)"  # Example of a length distribution, for error messages.


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter and its traffic; with rank 0, the requests to the base model itself.

    `name`: unique within a workload; up to 256 characters, without control characters.
    `rank`: LoRA rank, 1 … 512. With 0 the requests use no adapter: they take no slot and load nothing.
    `rate`: mean request rate, req/s, at least `MIN_RATE`; 0: the adapter is served, but idle (`IDLE_RATE`).
    `input_tokens`, `output_tokens`: length distributions; None takes the workload's.
    `model`: the base model that the adapter was trained for; None in a fleet of one model. Adapters of different
    models never share a server.
    `slo_class`: the class of limits in the workload's `Goal`; None: the limits of adapters without a class.
    `shared_prefix_tokens`: number of tokens that all prompts begin with, such as a system prompt; included in
    `input_tokens`. Prefix caching computes the prefix once, as long as the KV cache keeps it.
    `sessions`: conversations that the requests belong to; None takes the workload's.
    `priority`: priority of the requests on servers with `scheduling_policy` "priority"; smaller is served first.
    `acceptance`: share of draft tokens that are accepted by speculative decoding; None takes the profile's.
    """

    name: str
    rank: int
    rate: float
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    model: str | None = None
    slo_class: str | None = None
    shared_prefix_tokens: int = 0
    sessions: Sessions | None = None
    priority: int = 0
    acceptance: float | None = None

    @checked
    def __post_init__(self) -> None:
        checks.keep_name(self, "name", "an adapter's name")
        who = f"of adapter {self.name!r}"
        checks.keep_integer(self, "rank", f"the rank {who}", low=0, high=MAX_RANK)
        checks.keep_real(self, "rate", f"the rate {who}", low=0.0, high=MAX_RATE)
        if not self.rate:
            object.__setattr__(self, "rate", IDLE_RATE)
        if self.rate < MIN_RATE:
            checks.real(f"the rate {who}", self.rate, low=MIN_RATE)
        shared = "shared_prefix_tokens"
        checks.keep_integer(self, shared, f"{shared} {who}", low=0, high=MAX_TOKENS)
        checks.keep_integer(self, "priority", f"the priority {who}", low=-MAX_PRIORITY, high=MAX_PRIORITY)
        if self.acceptance is not None:
            checks.keep_real(self, "acceptance", f"the acceptance {who}", low=0.0, high=1.0)
        for own in ("model", "slo_class"):
            if getattr(self, own) is not None:
                checks.keep_name(self, own, f"the {own} {who}")
        for side in ("input_tokens", "output_tokens"):
            if getattr(self, side) is not None:
                checks.instance(f"{side} {who}", getattr(self, side), Lengths, A_LENGTH)
        if self.sessions is not None:
            checks.instance(f"sessions {who}", self.sessions, Sessions, "packer.Sessions(turns=4)")

    def at_rate(self, rate: float) -> Adapter:
        """The same adapter at another rate above 0. Only the rate is checked: searches make thousands of copies."""
        what = f"the rate of adapter {self.name!r}"
        return changed(self, rate=checks.real(what, rate, low=0.0, open_low=True))


def changed(adapter: Adapter, **values: object) -> Adapter:
    """A copy with these values, which are not checked: computed rates may be out of the range of given ones."""
    made, write = object.__new__(Adapter), object.__setattr__
    for name in Adapter.__slots__:
        write(made, name, values[name] if name in values else getattr(adapter, name))
    return made
