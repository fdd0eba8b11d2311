"""A member of a reconfigurable group of the backend "elasticgang": `python -m tests.integration.reconfigure_ranks CASE
PORT NAME`. The members exchange handles by a store at PORT, which the test owns. Prints what it saw, as JSON."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from elasticgang.errors import GangError, InvalidOperationError, MembershipError

LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=3)


def options_of(uuid: int, handles: list[str] | set[str], timeout: timedelta | None = LONG) -> Any:
    """torch's, where torch has them."""
    options = getattr(torch._C._distributed_c10d, "ReconfigureOptions", SimpleNamespace)()
    options.uuid, options.handles, options.timeout, options.hints = uuid, handles, timeout, {}
    return options


class Member:
    """This process. `hub`: the test's store."""

    def __init__(self, port: int, name: str) -> None:
        self.hub = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=100))
        self.name = name
        self.seen: dict[str, Any] = {}
        self.group: Any = None

    def init(self, **options: Any) -> None:
        dist.init_process_group("elasticgang", timeout=LONG, **options)
        self.group = dist.group.WORLD

    def found(self, size: int) -> None:
        """The first group. Rank 0 serves its store."""
        rank = int(self.name)
        if rank == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.hub.set("port", str(store.port))
        else:
            store = TCPStore("127.0.0.1", int(self.hub.get("port")), is_master=False)
        self.init(store=store, rank=rank, world_size=size)

    def handles(self, turn: str, *names: str) -> list[str]:
        """Those of the members with these names, in this order."""
        self.hub.set(f"{turn}/{self.name}", self.group.get_reconfigure_handle())
        return [self.hub.get(f"{turn}/{name}").decode() for name in names]

    def reconfigure(self, uuid: int, handles: list[str] | set[str], timeout: timedelta | None = LONG) -> None:
        work = self.group.reconfigure(options_of(uuid, handles, timeout))
        assert work.wait()
        assert work.is_completed()

    def look(self, what: str) -> None:
        """Collectives of several kinds, of torch's functions."""
        total = torch.tensor([float(2 ** int(self.name))])
        dist.all_reduce(total)
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, self.name)
        first = torch.tensor([float(self.name)])
        dist.broadcast(first, group_src=0)
        dist.barrier()
        self.seen[what] = [dist.get_rank(), dist.get_world_size(), total.item(), names, first.item()]

    def end(self, *names: str) -> None:
        """Once all of them have come here, so that no end is taken for a death."""
        self.hub.set(f"done/{self.name}", "")
        self.hub.wait([f"done/{name}" for name in names])
        print(json.dumps(self.seen), flush=True)
        dist.destroy_process_group()


def kill(member: Member) -> None:
    """Three members of which "0" is killed; then "3" joins."""
    if member.name == "3":
        member.init(store=HashStore(), rank=0, world_size=1)
        member.look("alone")
    else:
        member.found(3)
        member.look("founded")
        member.hub.set(f"ready/{member.name}", str(os.getpid()))
        if member.name == "0":
            member.hub.wait(["never"])
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            member.seen["lost"] = isinstance(error, GangError)
        member.reconfigure(1, member.handles("second", "1", "2"))
        member.look("survivors")
        member.hub.set(f"survived/{member.name}", "")
    handles = member.handles("third", "2", "3", "1")
    member.reconfigure(2, handles)
    member.look("joined")
    try:
        member.reconfigure(2, member.handles("fourth", "1", "2", "3"))
    except MembershipError as error:
        member.seen["same uuid"] = "already used" in str(error)
    try:
        member.reconfigure(3, handles)
    except MembershipError as error:
        member.seen["old handles"] = "present handle" in str(error)
    member.look("still joined")
    member.reconfigure(4, set(member.handles("fourth", "1", "2", "3")), timeout=None)
    ranks = [None] * 3
    dist.all_gather_object(ranks, dist.get_rank())
    member.seen["of a set"] = ranks
    member.end("1", "2", "3")


def absent(member: Member) -> None:
    """Two members wait for "2", which gave its handle and does not come; then they go on without it."""
    member.found(3)
    handles = member.handles("first", "0", "1", "2")
    if member.name != "2":
        try:
            member.reconfigure(1, handles, SHORT)
        except GangError:
            member.seen["absent"] = [dist.get_rank(), dist.get_world_size()]
            member.seen["same handle"] = member.group.get_reconfigure_handle() == handles[int(member.name)]
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            member.seen["between"] = isinstance(error, GangError)
        member.reconfigure(2, handles[:2])
        member.look("without it")
    member.end("0", "1", "2")


def others(member: Member) -> None:
    """Another group of the process stays while nothing is pending; all that share a process end with what is."""
    member.found(2)
    pair, single = dist.new_group([0, 1]), dist.new_group([0])
    member.reconfigure(1, member.handles("first", "0", "1"))
    both = torch.ones(1)
    dist.all_reduce(both, group=pair)
    member.seen["idle"] = both.item()
    if member.name == "0":
        work = dist.all_reduce(torch.ones(1), group=pair, async_op=True)  # the other one does not come
        member.group = pair
        member.reconfigure(2, [member.group.get_reconfigure_handle()])
        for what, operation in (("pending", work.wait), ("single", lambda: dist.all_reduce(both, group=single))):
            try:
                operation()
            except RuntimeError as error:
                member.seen[what] = type(error).__name__
        dist.all_reduce(both, group=pair)
        member.seen["alone"] = [dist.get_rank(pair), pair.size(), both.item()]
        member.hub.set("seen", "")
    member.hub.wait(["seen"])
    member.look("own")
    member.end("0", "1")


def interface(member: Member) -> None:
    """By torch's own functions, which there are since 2.15."""
    functions: Any = dist
    member.init(store=HashStore(), rank=0, world_size=3, enable_reconfigure=True)
    assert functions._supports_reconfigure()
    try:
        dist.all_reduce(torch.ones(1))
    except InvalidOperationError as error:
        member.seen["unconfigured"] = str(error)
    member.hub.set(f"handle/{member.name}", functions._get_reconfigure_handle())
    handles = [member.hub.get(f"handle/{name}").decode() for name in "012"]
    functions._reconfigure(5, handles, timeout=LONG).wait()
    member.look("configured")
    member.end("0", "1", "2")


if __name__ == "__main__":
    {"kill": kill, "absent": absent, "others": others, "interface": interface}[sys.argv[1]](
        Member(int(sys.argv[2]), sys.argv[3])
    )
