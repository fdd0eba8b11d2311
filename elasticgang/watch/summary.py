"""What a job does, from the events of one agent and the status pages of its ranks, as plain data. Pure.

Steps, changes and lost seconds are the whole job's, as this agent sees them. Reported numbers, who is healed how far,
and lost data workers are those of the ranks of its host.

SUMMARY-1  Events go in one by one, and what is kept of them is bounded, so that a job of any length can be followed.
SUMMARY-2  Once a step is committed in a generation, its learners have healed, and count as active.
SUMMARY-3  The seconds of a change under way are counted by the rule by which the agent counts those of one that is
    over, less those of the step under way. Goodput contains both, in the status, on the page and in the metrics. A
    change begins before its record is agreed: once a rank of this host that had a seat has died, or all of them have
    left their generation.
SUMMARY-4  What the ranks report is read from their pages. Where there are none, as of a job that has ended, the events
    have what was reported last, and the history of a page that starts late what was reported before (NUMBERLOG-1).
SUMMARY-5  The step is the highest one known to be committed since the present generation began, also once the ranks of
    this host have exited. Steps of earlier generations beyond its first one are void: the job has gone back.
SUMMARY-6  A seat of this host whose rank has exited is gone, and so are all seats of this host once its agent does not
    run, and all seats of a job that has finished.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticgang.observe.event_names import DATA_WORKER_LOSSES
from elasticgang.observe.pace import NUM_BEGINNINGS, Commits, mean_numbers, seconds_lost, step_seconds, steps_per_second
from elasticgang.observe.story import DIED

Event = Mapping[str, Any]

NUM_CHANGES = 50
_NO_EVENTS = "its events could not be written, or it was killed before it wrote any"
_SEATS = ("active", "learner", "spare", "gone")
_NOT_SEEN = "no agent that writes its events is seen from here: it has ended, or it runs elsewhere"
_LAYOUTS = ("layout", "fallback_of")
_KEPT = ("generation", "cause", "wall", "phases_ms", "checkpoint", "in_doubt", "layout_before", *_LAYOUTS)


@dataclass(frozen=True)
class RankStatus:
    """A status page. `step`, `generation`: the committed attempt. `doing`: the name of its `ThreadState`. `healing`:
    bytes received, of how many. `numbers`: by name, the last value and the mean one. `saving`: bytes written of a
    checkpoint, of how many."""

    step: int = 0
    generation: int = 0
    doing: str = "STARTING"
    commits: Commits = ()
    healing: tuple[int, int] = (0, 0)
    numbers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    saving: tuple[int, int] = (0, 0)


class Summary:
    """`add` every event in order; `report` at any time."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}  # of the ranks of this host that live, by member
        self._local_ranks: dict[str, int] = {}
        self._started: Event | None = None
        self._agent: str | None = None
        self._end: Event | None = None
        self._signal: Event | None = None
        self._last: Event | None = None
        self._generation: Event | None = None
        self._is_settled = False  # the present generation has committed a step
        self._step = 0  # SUMMARY-5: from the events
        self._seated: dict[str, str] = {}  # the members of this host with a seat, and its status
        self._gone: set[tuple[str | None, int]] = set()  # seats of this host: agent and local rank (SUMMARY-6)
        self._ended_at: float | None = None  # when this agent last saw that the present generation ends
        self._newest_commit: tuple[int, float] | None = None  # that the agent knew then
        self._beginnings: deque[float] = deque(maxlen=NUM_BEGINNINGS)  # of generations
        self._counted_to = (0, 0.0)  # the commit up to which `_lost_s` counts
        self._step_s: float | None = None
        self._changes: deque[dict[str, Any]] = deque(maxlen=NUM_CHANGES)  # SUMMARY-1
        self._num_changes: Counter[str] = Counter()
        self._lost_s: defaultdict[str, float] = defaultdict(float)
        self._phase_s: defaultdict[str, float] = defaultdict(float)
        self._healed_bytes = 0
        self._device_faults: dict[int | str, dict[str, Any]] = {}  # by index, or by UUID
        self._data_workers_lost: Counter[str] = Counter()  # by kind
        self._exiting: Event = {}
        self._reported: Event | None = None  # SUMMARY-4
        self._reported_rate = 0.0  # steps a second from the event before
        self._saved: Event | None = None  # of the newest checkpoint that this agent knows
        self._unreachable: Event | None = None  # since when there is no session with the coordinator

    def add(self, event: Event) -> None:
        self._last = event
        match event["event"]:
            case "started":
                if self._started is not None and _process_of(event) != _process_of(self._started):
                    self.__init__()  # type: ignore[misc]  # another job's events follow in the same file
                    self._last = event
                self._started, self._agent, self._unreachable = self._started or event, event["agent"], None
                self._counted_to = self._counted_to if self._counted_to[1] else (0, event["monotonic"])
            case "spawned":
                self.pids[event["member"]] = event["pid"]
                self._local_ranks[event["member"]] = event["local_rank"]
            case "exited":
                self.pids.pop(event["member"], None)
                self._local_ranks.pop(event["member"], None)
                self._add_committed(*event.get("committed", (0, 0)))
                status = self._seated.get(event["member"])
                if status is not None:
                    self._gone.add((self._agent, event["local_rank"]))
                self._add_end(event, ends=status not in (None, "spare") and event["status"] != 0)
            case "requested":
                self._add_end(event, ends=any(status != "spare" for status in self._seated.values()))
            case "generation":
                self._generation, self._is_settled, self._step = event, False, event["committed"][0]
                self._seated, self._gone, self._ended_at = self._members_of(event), set(), None
                self._beginnings.append(event["t"])
                self._add_saved(event)
                step, at_s = event.get("counted_to") or (event["committed"][0], self._counted_to[1])
                self._counted_to = (step, at_s)
                self._step_s = event.get("step_s") or self._step_s
            case "generation_change":
                self._count(event)
            case "healed":
                self._healed_bytes += event["bytes"]
            case "saved":
                if self._saved is None or event["step"] >= self._saved["step"]:
                    self._saved = event
                self._add_committed(event["step"], event["generation"])
            case "reported":
                self._add_reported(event)
            case "coordinator unreachable" | "coordinator reachable":
                self._unreachable = event if event["event"] == "coordinator unreachable" else None
            case "data_worker_lost":
                self._data_workers_lost[event["kind"]] += 1
            case "device_fault":
                self._add_device_fault(event)
            case "exiting":
                self._exiting = event
            case "signal":
                self._signal = event
            case "ended" | "failed":
                self._end = event

    def _count(self, change: Event) -> None:
        kind, lost_s = change.get("kind", "elsewhere"), change.get("lost_s") or 0.0
        self._num_changes[kind] += 1
        self._lost_s[kind] += lost_s
        for name, ms in (change.get("phases_ms") or {}).items():
            self._phase_s[name] += (ms or 0.0) / 1e3
        self._counted_to, self._step_s = (0, change["t"]), change.get("step_s") or self._step_s
        self._is_settled = self._generation is not None and change["generation"] == self._generation["generation"]
        kept = {name: change.get(name) for name in _KEPT}
        numbers = {name: len(change.get(name) or ()) for name in ("left", "joined", "moved")}
        self._changes.append({**kept, **numbers, "kind": kind, "lost_s": lost_s})

    def _add_device_fault(self, event: Event) -> None:
        device = event["uuid"] if event.get("is_chosen") else event["device"]
        before = self._device_faults.get(device, {"num_faults": 0})
        self._device_faults[device] = {
            "device": device,
            "uuid": event.get("uuid", ""),
            "num_faults": before["num_faults"] + 1,
            "reason": event["reason"],
            "is_quarantined": event["is_quarantined"],
        }

    def _members_of(self, generation: Event) -> dict[str, str]:
        here = [host["seats"] for host in generation["seats"] if host["agent"] == self._agent]
        statuses = {local_rank: status for seats in here for local_rank, _, status in seats}
        return {
            member: statuses[local_rank] for member, local_rank in self._local_ranks.items() if local_rank in statuses
        }

    def _add_end(self, event: Event, *, ends: bool) -> None:
        """SUMMARY-3. `ends`: whether the generation does."""
        if (newest := event.get("newest_commit")) is not None:
            self._newest_commit = (newest[0], newest[1])
        self._ended_at = event["t"] if ends else self._ended_at

    def _add_committed(self, step: int, generation: int) -> None:
        """SUMMARY-5."""
        if self._is_present(generation):
            self._step = max(self._step, step)

    def _is_present(self, generation: int) -> bool:
        """Whether a step that was committed in it counts. The events may be late."""
        present: int = (self._generation or {}).get("generation", 0)
        return generation >= present

    def _add_reported(self, event: Event) -> None:
        self._add_committed(event["step"], event.get("generation", 0))
        before = self._reported
        if before is not None and event["t"] > before["t"]:
            self._reported_rate = round(max(0, event["step"] - before["step"]) / (event["t"] - before["t"]), 4)
        self._reported = event

    def _add_saved(self, generation: Event) -> None:
        """A rank of another host may have saved the checkpoint, or the job has gone back beyond it."""
        named, known = generation.get("saved"), -1 if self._saved is None else self._saved["step"]
        if known > generation["committed"][0] or (named is not None and named > known):
            self._saved = None if named is None else {"step": named}

    @property
    def agent_pid(self) -> int | None:
        """None: the agent has not started yet."""
        return None if self._started is None else self._started["pid"]

    def clock_at(self, wall: float) -> float:
        """The agent's CLOCK_MONOTONIC at that time, as far as its last event tells."""
        return 0.0 if self._last is None else self._last["t"] + max(0.0, wall - self._last["wall"])

    def report(self, ranks: Mapping[str, RankStatus], now_s: float, *, is_alive: bool | None) -> dict[str, Any]:
        """`ranks`: the pages by member. `now_s`: CLOCK_MONOTONIC seconds. `is_alive`: whether the agent runs; None:
        nobody knows."""
        generation: Event = self._generation or {}
        began_s = 0.0 if self._started is None else self._started["monotonic"]
        if not is_alive and self._last is not None:
            now_s = self._last["t"]
        elapsed_s = max(0.0, now_s - began_s) if self._started is not None else 0.0
        commits = max((status.commits for status in ranks.values()), key=_newest, default=())
        began_at = (generation.get("committed") or (0,))[0]
        seen = (status.step for status in ranks.values() if self._is_present(status.generation))
        step = max(self._step, self._exiting.get("step", 0), *seen)
        has_learners = not self._is_settled and step <= began_at
        has_ended = bool(is_alive) and self._ended_at is not None and _newest(commits)[0] <= self._ended_at
        is_changing = bool(is_alive) and (has_ended or not self._is_settled)
        rate = steps_per_second(commits, generation.get("t", 0.0))
        lost: dict[str, float] = dict(self._lost_s)
        if is_changing and self._started is not None:
            lost["under_way"] = self._lost_under_way(commits, now_s, has_ended=has_ended)
        lost_s = sum(lost.values())
        tokens = [status.numbers["tokens"][1] for status in ranks.values() if "tokens" in status.numbers]
        state = self._state(is_alive)

        def status_of(agent: str, local_rank: int, status: str) -> str:
            is_over = state["state"] == "finished" or (agent == self._agent and is_alive is False)
            if is_over or (agent, local_rank) in self._gone:  # SUMMARY-6
                return "gone"
            return "active" if status == "learner" and not has_learners else status  # SUMMARY-2

        hosts = [self._host(host, ranks, status_of) for host in generation.get("seats", ())]
        counts = Counter(seat["status"] for host in hosts for seat in host["seats"])
        return {
            "job": (self._started or {}).get("job"),
            "agent": self._agent,
            "host": (self._started or {}).get("host"),
            **state,
            "elapsed_s": round(elapsed_s, 3),
            "wall": (self._started or {}).get("wall", 0.0) + max(0.0, now_s - (self._started or {}).get("t", now_s)),
            "generation": generation.get("generation", 0),
            "is_changing": is_changing,
            "has_ended": has_ended,
            **{name: generation.get(name) for name in _LAYOUTS},
            "seats": {status: counts[status] for status in _SEATS},
            "hosts": hosts,
            "step": step,
            "steps_per_s": round(rate, 4) if is_alive else 0.0,
            "last_commit_age_s": round(now_s - _newest(commits)[0], 3) if commits and is_alive else None,
            "coordinator_away": self._coordinator_away(now_s) if is_alive else None,
            "tokens_per_s": round(rate * sum(tokens), 2) if tokens and is_alive else None,
            "numbers": self._numbers(ranks),
            "goodput": round(max(0.0, 1 - lost_s / elapsed_s), 5) if elapsed_s else None,
            "lost_s": {cause: round(lost[cause], 3) for cause in sorted(lost)},
            "num_changes": dict(sorted(self._num_changes.items())),
            "phase_s": {name: round(s, 4) for name, s in self._phase_s.items()},
            "healed_bytes": self._healed_bytes,
            "healing": self._under_way({member: status.healing for member, status in ranks.items()}, "received_bytes"),
            "saving": self._under_way({member: status.saving for member, status in ranks.items()}, "written_bytes"),
            "checkpoint": self._checkpoint(now_s if is_alive else None),
            "data_workers_lost": {kind: self._data_workers_lost[kind] for kind in DATA_WORKER_LOSSES},
            "device_faults": [self._device_faults[device] for device in sorted(self._device_faults, key=str)],
            "changes": list(self._changes),
        }

    def _numbers(self, ranks: Mapping[str, RankStatus]) -> dict[str, float | str]:
        """SUMMARY-4."""
        found = mean_numbers({name: last for name, (last, _) in each.numbers.items()} for each in ranks.values())
        return found or dict((self._reported or {}).get("numbers", {}))

    def reported(self) -> dict[str, Any] | None:
        """The newest event about numbers, as a point of the history. None: there is none yet."""
        if self._reported is None:
            return None
        began_s = self._reported["t"] if self._started is None else self._started["monotonic"]
        return {
            "elapsed_s": max(0.0, self._reported["t"] - began_s),
            "step": self._reported["step"],
            "steps_per_s": self._reported_rate,
            "numbers": self._reported["numbers"],
        }

    def _lost_under_way(self, commits: Commits, now_s: float, *, has_ended: bool) -> float:
        """SUMMARY-3. `has_ended`: the next change is under way too, and counts from the newest commit on."""
        step_s = step_seconds(commits, self._beginnings) or self._step_s or 0.0
        since, before_s = self._counted_to, 0.0
        known = [*commits[-1:], *([] if self._newest_commit is None else [self._newest_commit])]
        newest = max((commit for commit in known if commit[1] > since[1]), key=lambda commit: commit[1], default=None)
        if has_ended and newest is not None:
            before_s = 0.0 if self._is_settled else seconds_lost(since, newest, step_s, now_s)
            since, newest = newest, None
        lost_s = seconds_lost(since, newest, step_s, now_s)
        return before_s + (lost_s if newest is not None else max(0.0, lost_s - step_s))

    def _state(self, is_alive: bool | None) -> dict[str, Any]:
        if self._end is not None:
            return {"state": self._end["event"], "reason": self._end.get("reason", "")}
        if is_alive:
            return {"state": "running" if self._generation is not None else "starting", "reason": ""}
        if self._exiting.get("code") == 0:
            return {"state": "finished", "reason": ""}
        if self._signal is not None:
            return {"state": "stopped", "reason": f"the agent was stopped by {self._signal['signal']}"}
        if self._last is None:
            return {"state": "unknown", "reason": _NO_EVENTS}
        if is_alive is None:
            return {"state": "unknown", "reason": _NOT_SEEN}
        return {"state": "died", "reason": DIED}

    def _coordinator_away(self, now_s: float) -> dict[str, Any] | None:
        """For how long this agent has had no session with the coordinator, and why. None: it has one."""
        if self._unreachable is None:
            return None
        away_s = round(max(0.0, now_s - self._unreachable["t"]), 3)
        return {"away_s": away_s, "reason": self._unreachable["reason"]}

    def _checkpoint(self, now_s: float | None) -> dict[str, Any] | None:
        """The newest complete one. What only a rank of its host knows is None. `now_s`: None if the agent does not run:
        its clock may have been that of another boot."""
        if self._saved is None:
            return None
        age_s = None if now_s is None or "t" not in self._saved else round(max(0.0, now_s - self._saved["t"]), 3)
        return {"step": self._saved["step"], "age_s": age_s} | {
            name: self._saved.get(name) for name in ("wall", "bytes", "duration_s", "path")
        }

    def _host(
        self, host: Mapping[str, Any], ranks: Mapping[str, RankStatus], statuses: Callable[[str, int, str], str]
    ) -> dict[str, Any]:
        """`statuses`: of a seat, from its agent, its local rank, and its status when the generation began."""
        is_here = host["agent"] == self._agent
        here = {self._local_ranks[member]: status for member, status in ranks.items() if member in self._local_ranks}
        seats = []
        for local_rank, rank, status in host["seats"]:
            seat = {"local_rank": local_rank, "rank": rank, "status": statuses(host["agent"], local_rank, status)}
            if is_here and local_rank in here:
                seat |= {"step": here[local_rank].step, "doing": here[local_rank].doing}
            seats.append(seat)
        out_of_reach = list(host.get("out_of_reach", ()))
        return {
            "agent": host["agent"],
            "host": host["host"],
            "is_here": is_here,
            "out_of_reach": out_of_reach,
            "seats": seats,
        }

    def _under_way(self, work: Mapping[str, tuple[int, int]], name: str) -> list[dict[str, int]]:
        """The ranks of this host that do it at this moment. `name`: of the bytes that are done."""
        return [
            {"local_rank": self._local_ranks[member], name: done, "bytes": total}
            for member, (done, total) in work.items()
            if member in self._local_ranks and done < total
        ]


def _process_of(started: Event) -> tuple[int, float]:
    """The agent's process: in containers, each one may have the same pid. An agent that rejoins goes on."""
    return started.get("pid", 0), started.get("monotonic", 0.0)


def _newest(commits: Commits) -> tuple[float, int]:
    return (commits[-1][1], len(commits)) if commits else (0.0, 0)
