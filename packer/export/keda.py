"""KEDA: a ScaledObject with cron triggers for each server that a schedule stops for part of the day."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from zoneinfo import available_timezones

from packer.errors import ValidationError, shown
from packer.export import templates
from packer.times import DAY_S, joined

_MINUTE_S = 60.0
NOTHING = "# Every server runs all day: nothing is scaled.\n"


def scaled_objects(
    running: Mapping[str, Sequence[tuple[float, float]]], *, day_s: float = DAY_S, startup_s: float = 0.0,
    timezone: str = "UTC", namespace: str | None = None,
) -> str:  # fmt: skip
    """YAML for `kubectl apply -f`, in addition to the static plan's Deployments (`packer export --format k8s`).

    `running`: name of each Deployment → (start, end) of the periods in which it is needed, s from a midnight, in
    whole minutes. Deployments that run all day, or are never off for longer than they take to start, are left out of
    the output.
    `day_s`: length of the repeating day, s; cron triggers support only 24 h.
    `startup_s`: how much earlier a server is started, s, rounded up to a minute.
    `timezone`: time zone, as in cron triggers.
    Raises `ValidationError`: the day is not 24 h long, or there is no such time zone.
    """
    check_day(day_s, timezone)
    early_s = math.ceil(startup_s / _MINUTE_S) * _MINUTE_S
    needed = {name: joined(spans, early_s) for name, spans in running.items()}
    scaled = {
        name: [(_cron((start_s - early_s) % DAY_S), _cron(end_s % DAY_S)) for start_s, end_s in spans]
        for name, spans in needed.items()
        if spans != [(0.0, DAY_S)]
    }
    if not scaled:
        return NOTHING
    return templates.render("keda.yaml", scaled=scaled, timezone=timezone, namespace=namespace)


def check_day(day_s: float, timezone: str = "UTC") -> None:
    """Raise `ValidationError` unless a schedule of this length and time zone can be written as cron triggers."""
    known = {"UTC"} if timezone == "UTC" else available_timezones()
    if known and timezone not in known:  # a machine may have no time zones at all
        raise ValidationError(f"Expected a time zone like UTC or Europe/Berlin, got {shown(timezone)}.")
    if day_s != DAY_S:
        raise ValidationError(f"Expected a schedule of 24 h for cron triggers, got one of {shown(day_s / 3600)} h.")


def _cron(time_s: float) -> str:
    minutes = round(time_s / _MINUTE_S)
    return f"{minutes % 60} {minutes // 60 % 24} * * *"
