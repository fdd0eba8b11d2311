"""What a job does, as lines of text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from elasticgang.observe.change_report import PHASES, name_layout
from elasticgang.observe.story import escape
from elasticgang.progress import bar, share

_MAX_HOSTS = 16
_LATE_STEPS = 10  # in the time of so many steps none was committed
_MARKS = {"active": "", "learner": "L", "spare": "spare", "gone": "X"}


def lines_of(status: Mapping[str, Any], num_changes: int = 5) -> Iterator[str]:
    """`status`: what `Summary.report` returns. Control characters in it, which a terminal would obey, are escaped."""
    return map(escape, _lines_of(status, num_changes))


def _lines_of(status: Mapping[str, Any], num_changes: int) -> Iterator[str]:
    nameless = "a job without events" if status["state"] == "unknown" else "a job that has not started"
    name = f"job {status['job']}" if status["job"] else nameless
    yield f"{name}: {status['state']}" + (f" ({status['reason']})" if status["reason"] else "")
    if status["agent"]:
        yield f"  agent {status['agent']}, for {_span(status['elapsed_s'])}"
    changing = ", which has not committed a step yet" if status["is_changing"] else ""
    if status["has_ended"]:
        changing = ", which has ended; the next one is not agreed yet"
    yield f"  generation {status['generation']}{changing}: {_counts(status['seats']) or 'no seats'}"
    if status["layout"] is not None:
        yield f"  layout {name_layout(status)}"
    rates = [f"step {status['step']}", f"{status['steps_per_s']:.2f} steps/s"]
    if status["last_commit_age_s"] is not None:
        stands_still = status["last_commit_age_s"] * status["steps_per_s"] > _LATE_STEPS
        rates.append(f"last commit {status['last_commit_age_s']:.1f} s ago{' (stands still)' * stands_still}")
    yield "  " + ", ".join(rates)
    if (away := status["coordinator_away"]) is not None:
        yield f"  no session with the coordinator for {away['away_s']:.1f} s: {away['reason']}"
    reported = [f"{name} {_number(value)}" for name, value in status["numbers"].items() if name != "tokens"]
    if status["tokens_per_s"] is not None:
        reported.insert(0, f"{status['tokens_per_s']:,.0f} tokens/s")
    if reported:
        yield f"  reported by this agent's ranks: {', '.join(reported)}"
    if status["goodput"] is not None:
        yield f"  goodput {100 * status['goodput']:.1f} %{_lost(status)}"
    if status["checkpoint"] is not None:
        yield f"  newest checkpoint: {_checkpoint(status['checkpoint'])}"
    shown = _shown(status["hosts"])
    for host in shown:
        here = ", this agent" if host["is_here"] and len(status["hosts"]) > 1 else ""
        hosts = ", ".join(host["out_of_reach"])
        why = f" (left out: it and {hosts} do not reach each other)" if hosts else ""
        yield f"  {host['host']} ({host['agent']}{here}): {_seats(host['seats'])}{why}"
    if hidden := [host for host in status["hosts"] if host not in shown]:
        counts = Counter(seat["status"] for host in hidden for seat in host["seats"])
        yield f"  and {len(hidden)} more hosts: {_counts(counts)}"
    for heal in status["healing"]:
        received, total = heal["received_bytes"], heal["bytes"]
        yield f"  local rank {heal['local_rank']} heals: {bar(received, total)} {share(received, total)}"
    for save in status["saving"]:
        written, total = save["written_bytes"], save["bytes"]
        yield f"  local rank {save['local_rank']} saves: {bar(written, total)} {share(written, total)}"
    if lost := [f"{number} {kind}" for kind, number in status["data_workers_lost"].items() if number]:
        yield f"  data workers of this agent's ranks that were lost, and replaced: {', '.join(lost)}"
    for fault in status["device_faults"]:
        yield f"  {_device(fault)}"
    for change in list(status["changes"])[-num_changes:]:
        yield f"  {_change(change)}"


def _shown(hosts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most `_MAX_HOSTS`, in their order: this one, those with a seat that is not active, and then the first."""
    ordinary = [not host["is_here"] and all(seat["status"] == "active" for seat in host["seats"]) for host in hosts]
    chosen = sorted(range(len(hosts)), key=lambda place: (not hosts[place]["is_here"], ordinary[place]))
    return [hosts[place] for place in sorted(chosen[:_MAX_HOSTS])]


def _lost(status: Mapping[str, Any]) -> str:
    parts = [
        f"{cause} {seconds:.2f} s" + (f" ({status['num_changes'][cause]})" if cause in status["num_changes"] else "")
        for cause, seconds in status["lost_s"].items()
    ]
    return f"; lost by cause: {', '.join(parts)}" if parts else ""


def _checkpoint(saved: Mapping[str, Any]) -> str:
    if saved["wall"] is None:
        return f"step {saved['step']}"
    at = datetime.fromtimestamp(saved["wall"]).strftime("%Y-%m-%d %H:%M:%S")
    when = f"saved at {at}" if saved["age_s"] is None else f"{_span(saved['age_s'])} ago"
    size = f"{saved['bytes'] / 1e6:,.1f} MB in {saved['duration_s']:.1f} s"
    return f"step {saved['step']}, {when}, {size}: {saved['path']}"


def _device(fault: Mapping[str, Any]) -> str:
    number = fault["num_faults"]
    quarantined = ", and is quarantined" if fault["is_quarantined"] else ""
    uuid = f" ({fault['uuid']})" if fault["uuid"] not in ("", fault["device"]) else ""
    return (
        f"device {fault['device']}{uuid} has failed {number} time{'s' * (number != 1)}{quarantined}: {fault['reason']}"
    )


def _change(change: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(change["wall"] or 0.0).strftime("%H:%M:%S")
    moves = ", ".join(f"{change[what]} {what}" for what in ("left", "joined", "moved") if change[what])
    taken = f"takes the layout {name_layout(change)}" if change["layout_before"] else ""
    phases = change["phases_ms"] or {}
    times = ", ".join(f"{name} {phases[name]:.0f}" for name in PHASES if phases.get(name))
    parts = [part for part in (moves, taken, f"lost {change['lost_s']:.2f} s", f"{times} ms" if times else "") if part]
    return f"{at}  generation {change['generation']}: {change['cause']}; {'; '.join(parts)}"


def _counts(seats: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in seats.items() if count)


def _seats(seats: Sequence[Mapping[str, Any]]) -> str:
    return " ".join(f"{_MARKS[seat['status']]}{'' if seat['rank'] is None else seat['rank']}" for seat in seats)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
