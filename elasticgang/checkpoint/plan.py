"""Pure: which rank writes which part of a checkpoint, and which checkpoints are kept.

SAVEPLAN-1  The ranks that save compute the same plan from the record and the active members, without a message. The
    plan's name is the name of the directory, so that parts of two plans never meet.
SAVEPLAN-2  The holders of a part of the state share its bytes. A member that drains writes only if all holders drain.
SAVEPLAN-3  A checkpoint is deleted only after `keep` newer ones are complete that are not marked as corrupt.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import Model, Record
from elasticgang.protocol.record_form import canonical_json

MIN_SHARE_BYTES = 8 << 20  # a smaller share is not worth a file
_NAME = re.compile(r"step-(\d{12})-(\d{1,12})-[0-9a-f]{16}")


@dataclass(frozen=True)
class SavePlan:
    """`holders`: the members that can write each part of the model, in the order in which they share it."""

    attempt: Attempt
    holders: dict[Model, tuple[str, ...]]
    directory: str

    def place(self, member: str) -> tuple[Model, int] | None:
        """The part that `member` writes a share of, and its number among the part's holders."""
        for model, members in self.holders.items():
            if member in members:
                return model, members.index(member)
        return None


def save_plan(record: Record, active: Collection[str], attempt: Attempt) -> SavePlan | None:
    """SAVEPLAN-1. None: no active member holds some part."""
    found: dict[Model, list[tuple[int, str, str]]] = {
        model: []
        for model in itertools.product(range(record.layout.pp), range(record.layout.sdp), range(record.layout.tp))
    }
    for seat in record.seats:
        if seat.member in active and seat.member in record.plan.ranks:
            model = record.model_coordinates(seat.member)
            found[model].append((record.plan.ranks[seat.member], seat.host, seat.member))
    holders = {}
    for model, members in found.items():
        staying = [member for member in members if member[2] not in record.draining_members]  # SAVEPLAN-2
        holders[model] = _over_hosts(staying or members)
    if not all(holders.values()):
        return None
    text = canonical_json([record.digest, list(attempt), [[list(model), held] for model, held in holders.items()]])
    return SavePlan(attempt, holders, directory_name(attempt, hashlib.sha256(text.encode()).hexdigest()[:16]))


def _over_hosts(members: Sequence[tuple[int, str, str]]) -> tuple[str, ...]:
    """In the order of ranks, but one of each host first, so that the first few are on as many hosts as there are."""
    turns: dict[str, int] = {}
    keyed = []
    for rank, host, member in sorted(members):
        keyed.append((turns.get(host, 0), rank, member))
        turns[host] = turns.get(host, 0) + 1
    return tuple(member for _, _, member in sorted(keyed))


def num_writers(num_holders: int, num_bytes: int) -> int:
    """How many holders of a part share the writing of its `num_bytes`."""
    return max(1, min(num_holders, num_bytes // MIN_SHARE_BYTES))


def share_of_rows(tensors: Sequence[tuple[int, int]], number: int, count: int) -> list[range]:
    """SAVEPLAN-2: the rows of each tensor that writer `number` of `count` writes. `tensors`: rows, and bytes of a row,
    of each tensor. The tensors lie behind one another, and each writer takes an equal stretch, from row to row."""
    total = sum(rows * row_bytes for rows, row_bytes in tensors)
    first, last = total * number // count, total * (number + 1) // count
    shares, position = [], 0
    for rows, row_bytes in tensors:
        if rows * row_bytes == 0:
            shares.append(range(0))
            continue
        low, high = (min(rows, max(0, math.ceil((edge - position) / row_bytes))) for edge in (first, last))
        shares.append(range(low, high))
        position += rows * row_bytes
    return shares


def directory_name(attempt: Attempt, plan: str) -> str:
    return f"step-{attempt.step:012d}-{attempt.generation}-{plan}"


def attempt_in(directory: str) -> Attempt | None:
    """The attempt that the name of a checkpoint's directory says; None: it is no such name."""
    found = _NAME.fullmatch(directory)
    return None if found is None else Attempt(int(found[1]), int(found[2]))


def obsolete(
    saved: str, complete: Collection[str], incomplete: Collection[str], keep: int, corrupt: Collection[str] = ()
) -> list[str]:
    """SAVEPLAN-3: directories to delete once `saved` is complete. Those of later attempts are left. `corrupt`: those of
    `complete` that are marked so."""

    def order(name: str) -> tuple[Attempt, bool, str]:
        attempt = attempt_in(name)
        assert attempt is not None
        return attempt, name == saved, name

    until = order(saved)
    older = sorted((name for name in complete if order(name) <= until), key=order, reverse=True)
    usable = [name for name in older if name not in corrupt]
    passed = older[older.index(usable[keep - 1]) + 1 :] if len(usable) >= keep else []
    return [*passed, *sorted(name for name in incomplete if order(name) < until)]


def remains(saved: str, incomplete: Collection[str]) -> list[str]:
    """Of the saves that are `incomplete`, those of attempts before that of `saved`. The next generation may be making
    another one of the same attempt."""
    own = attempt_in(saved)
    assert own is not None
    found = ((attempt_in(name), name) for name in incomplete)
    return sorted(name for at, name in found if at is not None and at < own)
