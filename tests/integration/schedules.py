"""Random schedules, as their test runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elasticgang.simulation.invariants import is_broken
from elasticgang.simulation.runner import Tally
from elasticgang.simulation.scenario import shrink, write


def run_all(parts: Iterable[Tally], num_schedules: int, per_mille: Mapping[str, int]) -> Tally:
    """The sum of `parts`: all schedules ran, none failed, and of a thousand so many saw what `per_mille` names."""
    total = Tally()
    for part in parts:
        total.add(part)
        assert not part.failures, format_failure(part)
    assert total.num_schedules == num_schedules
    assert {name: count for name, count in per_mille.items() if total.seen[name] < count * num_schedules / 1000} == {}
    return total


def format_failure(part: Tally) -> str:
    failure = part.failures[0]
    if not is_broken(failure.violation):
        return f"seed {failure.seed}: {failure.violation}"
    return write(shrink(failure))
