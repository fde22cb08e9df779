"""Numbers and names as people read them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence


def number(value: float | None, digits: int = 0) -> str:
    """A number with thousands separators; a dash for None, NaN and infinities."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def money(price: float | None) -> str:
    """A price in US dollars; a dash for None."""
    return "–" if price is None else f"${price:,.2f}"


def plural(count: int, name: str) -> str:
    """`name` in the singular or plural."""
    return name if count == 1 else f"{name}s"


def counted(count: int, name: str) -> str:
    """A count with its noun: "1 GPU", "2 GPUs"."""
    return f"{count:,} {plural(count, name)}"


def listed(items: Iterable[object], most: int = 8) -> str:
    """The first `most` items, separated by commas, and the number of the rest: "0, 1, 2 and 3 more"."""
    names = [str(item) for item in items]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def none_called(missing: Sequence[str], option: str, names: Iterable[str]) -> list[str]:
    """A warning that no request is to models that an option names, with the names in the traffic; empty for none."""
    said = f"no request names {listed(missing, 3)} ({option}): traffic is to {listed(sorted(names), 5) or 'no model'}"
    return [said] if missing else []


def prefixed(names: Sequence[str], known: Collection[str]) -> str:
    """Words about what stands before `known` names in most of these names, and the option that removes it; or empty."""
    ends = sorted((each for each in known if names and names[0].endswith(each)), key=len)
    prefix = names[0].removesuffix(ends[-1]) if ends else ""
    met = sum(name.startswith(prefix) and name.removeprefix(prefix) in known for name in names) if prefix else 0
    if 2 * met <= len(names) or prefix[-1].isalnum():
        return ""
    return f" Without {prefix!r} before it, {counted(met, 'name')} would be known: --strip-prefix {prefix} (of logs)."


def by_rank(ranks: Iterable[int]) -> str:
    """How many adapters have each rank, the largest first: "12×r32, 84×r8"; rank 0 is "base"."""
    return ", ".join(f"{n}×r{rank}" if rank else "base" for rank, n in sorted(Counter(ranks).items(), reverse=True))


def visible(value: object) -> str:
    """A text that is safe for a terminal or page: control characters and direction marks are escaped."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(value))
