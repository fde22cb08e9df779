"""Cron triggers of KEDA."""

from __future__ import annotations

import pytest
import yaml

from packer.errors import ValidationError
from packer.export.keda import scaled_objects


def test_a_server_that_is_off_at_night_has_a_trigger() -> None:
    """It starts its starting time earlier, and one that runs all day is left to its Deployment."""
    text = scaled_objects(
        {"gpu-0": [(0.0, 86400.0)], "gpu-1": [(8 * 3600.0, 20 * 3600.0)]}, startup_s=130.0, namespace="ml"
    )
    (found,) = yaml.safe_load_all(text)
    labels = {"app.kubernetes.io/managed-by": "packer"}
    assert found["metadata"] == {"name": "gpu-1", "namespace": "ml", "labels": labels}
    assert found["spec"]["scaleTargetRef"] == {"name": "gpu-1"}
    (trigger,) = found["spec"]["triggers"]
    assert trigger["metadata"] == {
        "timezone": "UTC",
        "start": "57 7 * * *",
        "end": "0 20 * * *",
        "desiredReplicas": "1",
    }


def test_unknown_time_zones_are_refused() -> None:
    """A name that the time zone database does not have would stop KEDA's triggers."""
    with pytest.raises(ValidationError, match=r"time zone like UTC .* got 'Mars/Base'"):
        scaled_objects({"gpu-0": [(0.0, 3600.0)]}, timezone="Mars/Base")
    assert "Europe/Berlin" in scaled_objects({"gpu-0": [(0.0, 3600.0)]}, timezone="Europe/Berlin")


def test_a_night_across_midnight_is_one_span() -> None:
    """A server that runs in the last and the first hour of the day does not stop in between."""
    text = scaled_objects({"gpu-0": [(0.0, 6 * 3600.0), (9 * 3600.0, 12 * 3600.0), (22 * 3600.0, 86400.0)]})
    (found,) = yaml.safe_load_all(text)
    spans = [(t["metadata"]["start"], t["metadata"]["end"]) for t in found["spec"]["triggers"]]
    assert spans == [("0 9 * * *", "0 12 * * *"), ("0 22 * * *", "0 6 * * *")]


NOON, MIDNIGHT = 12 * 3600.0, 86400.0


@pytest.mark.parametrize(
    ("running", "triggers"),
    [
        ([(3600.0, MIDNIGHT)], []),
        ([(7200.0, MIDNIGHT)], []),
        ([(7260.0, MIDNIGHT)], [("1 0 * * *", "0 0 * * *")]),
        ([(0.0, 7200.0), (14400.0, NOON)], [("0 22 * * *", "0 12 * * *")]),
        ([(3600.0, 7200.0), (NOON, MIDNIGHT)], [("0 10 * * *", "0 2 * * *")]),
        ([(0.0, 3600.0), (7200.0, NOON), (NOON + 3600.0, MIDNIGHT)], []),
    ],
)
def test_a_server_that_is_off_for_less_than_it_takes_to_start_stays_on(
    running: list[tuple[float, float]], triggers: list[tuple[str, str]]
) -> None:
    """Spans at most a start-up time apart, also over midnight, are one; without a longer gap there is no trigger."""
    text = scaled_objects({"gpu-0": running}, startup_s=7200.0)
    found = [each for document in yaml.safe_load_all(text) if document for each in document["spec"]["triggers"]]
    assert [(each["metadata"]["start"], each["metadata"]["end"]) for each in found] == triggers


def test_cron_knows_days_of_24_hours() -> None:
    """Another length is refused: its triggers would drift."""
    with pytest.raises(ValidationError, match="a schedule of 24 h"):
        scaled_objects({"gpu-0": [(0.0, 3600.0)]}, day_s=7200.0)


def test_servers_that_run_all_day_need_no_trigger() -> None:
    """A file without objects says so in a comment."""
    text = scaled_objects({"gpu-0": [(0.0, 86400.0)]})
    assert text.startswith("#")
    assert yaml.safe_load(text) is None
