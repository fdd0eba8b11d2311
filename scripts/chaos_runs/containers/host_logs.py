"""What the hosts of a job in containers did, from what they wrote.

Pure: no clock, process or torch. A host's files are its agent's events and its members' histories; all times are of
the one clock that containers of an engine share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from scripts.demo_job.run_log import RunLog, member_name


@dataclass
class HostLog:
    """`lives`: the members of each life of its agent (an agent's id is one life), in order."""

    events: list[dict[str, Any]] = field(default_factory=list)
    histories: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def lives(self) -> list[set[str]]:
        found: list[set[str]] = []
        for line in self.events:
            if line["event"] == "started":
                found.append(set())
            elif line["event"] == "spawned":
                found[-1].add(member_name(line["member"]))
        return found

    def committed(self, members: Iterable[str]) -> list[dict[str, Any]]:
        return [line for member in members for line in self.histories.get(member, ()) if line["kind"] == "committed"]

    def named(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.events if line["event"] == event]


def host_log_of(files: Mapping[str, bytes]) -> HostLog:
    """`files`: by path. A last line may be half written."""
    host = HostLog()
    for name, data in files.items():
        path = PurePosixPath(name)
        if path.suffix != ".jsonl":
            continue
        lines = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        if path.name == "events.jsonl":
            host.events = lines
        else:
            host.histories[path.stem] = lines
    return host


def run_log_of(hosts: Iterable[HostLog]) -> RunLog:
    run_log = RunLog()
    for host in hosts:
        for member, lines in host.histories.items():
            for line in lines:
                run_log.add_history(member, line)
    return run_log


def came_back_wrongly(name: str, host: HostLog) -> list[str]:
    """`host`'s agent has had two lives. The members of the second are new ones, and take part."""
    if len(host.lives) != 2:
        return [f"{name} has had {len(host.lives)} lives, instead of two"]
    before, after = host.lives
    found = []
    if before & after:
        found.append(f"{name} came back with members that it had before: {sorted(before & after)}")
    if not host.committed(after):
        found.append(f"no member of {name} committed anything after it came back")
    return found


def cut_off_wrongly(name: str, host: HostLog, without: int) -> list[str]:
    """`host` was cut off, and came back. `without`: the first generation of the others alone."""
    fenced = host.named("fenced")
    if len(fenced) != 1 or not host.lives:
        return [f"{name} ended its members {len(fenced)} times, instead of once"]
    members = host.lives[0]
    committed = host.committed(members)
    found = []
    if late := [line for line in committed if line["t"] > fenced[0]["t"]]:
        found.append(f"{name} committed {len(late)} steps after it should have ended its members")
    if foreign := [line for line in committed if line["generation"] >= without]:
        found.append(f"{name} committed {len(foreign)} steps while it was cut off")
    ended = {member_name(line["member"]) for line in host.named("exited")}
    if members - ended:
        found.append(f"members of {name} outlived its being cut off: {sorted(members - ended)}")
    return found
