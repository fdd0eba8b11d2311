"""Who is in a reconfigured process group, from the handles that its members have exchanged. Pure.

torch 2.15 has an interface for groups whose members change: `enable_reconfigure` of `init_process_group`, and
`supports_reconfigure`, `get_reconfigure_handle` and `reconfigure` of a group and of its backend
(torch/csrc/distributed/c10d/Backend.hpp, Types.hpp). Each member gives its handle, all get the same handles and a
number, `uuid`, that was never used, and the group then consists of the members with these handles.

MEMBERSHIP-1  A handle is of one member in one of its memberships: a member of which the handle is outdated takes no
    part.
MEMBERSHIP-2  Members connect only if they have the same handles in the same order, and the same `uuid`: the prefix of
    their rendezvous contains both.
MEMBERSHIP-3  A member uses a `uuid` once, also if the reconfiguration fails: its rendezvous may have left keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Set
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

from elasticgang.collectives.backend_name import BACKEND_NAME
from elasticgang.errors import MembershipError


class ReconfigureOptions(Protocol):
    """As torch's class of this name. `handles`: a list gives ranks by position, a set by the handles' order. `timeout`:
    None for the group's. `hints`: none are known, and all are ignored."""

    @property
    def uuid(self) -> int: ...

    @property
    def handles(self) -> Collection[str]: ...

    @property
    def timeout(self) -> timedelta | None: ...


@dataclass(frozen=True)
class Handle:
    """`member`: unique to the group object. `number`: of its memberships so far. `address`: of its store, "host:port",
    which lives as long as the member."""

    member: str
    number: int
    address: str

    def __str__(self) -> str:
        return f"{BACKEND_NAME}:{self.member}:{self.number}:{self.address}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Raises MembershipError: it is no handle of this backend."""
        backend, *rest = text.split(":", 3)
        if backend != BACKEND_NAME or len(rest) != 3 or not rest[1].isdecimal():
            raise MembershipError(f"{text!r} is no handle of a reconfigurable group of the backend {BACKEND_NAME!r}")
        return cls(rest[0], int(rest[1]), rest[2])

    def next(self) -> Handle:
        """MEMBERSHIP-1"""
        return replace(self, number=self.number + 1)


@dataclass(frozen=True)
class Membership:
    """This member's rank among `size`, and the store and prefix by which the members connect."""

    rank: int
    size: int
    address: str
    prefix: str


def membership(options: ReconfigureOptions, own: Handle, used: Set[int]) -> Membership:
    """The membership of the member with the handle `own`. `used`: its uuids so far.

    Raises:
        MembershipError: no handles, one twice, an invalid one, none of this member, or a uuid that was used.
    """
    given = options.handles
    handles = list(given) if isinstance(given, list | tuple) else sorted(given)
    if not handles:
        raise MembershipError("a reconfiguration needs at least one handle")
    if len(set(handles)) != len(handles):
        raise MembershipError("the handles of a reconfiguration must be unique")
    first, *_ = [Handle.parse(handle) for handle in handles]
    if str(own) not in handles:  # MEMBERSHIP-1
        raise MembershipError("this member's present handle is not among the handles: it has left, or been outdated")
    if options.uuid in used:  # MEMBERSHIP-3
        raise MembershipError(f"the uuid {options.uuid} was already used: each reconfiguration needs its own")
    digest = hashlib.sha256(json.dumps([options.uuid, handles]).encode()).hexdigest()
    return Membership(handles.index(str(own)), len(handles), first.address, f"reconfigured/{digest}")  # MEMBERSHIP-2
