"""All that can happen to the job of `commit_model.py`, searched breadth first."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from tests.unit.commit_model import (
    AWAY,
    DIES,
    FATES,
    LEARNER,
    PRESENT,
    Impossible,
    Mem,
    Op,
    Rule,
    Violation,
    World,
    history,
    perform,
)

# --- all that can happen


@dataclass(frozen=True)
class Bounds:
    """How far to look: `changes` of the generation, and attempts up to `steps`."""

    changes: int
    steps: int


@dataclass
class Found:
    """`num_worlds` distinct worlds and `num_proposals` were seen; `scenario` leads to the first `violation`."""

    num_worlds: int = 0
    num_proposals: int = 0
    violation: str = ""
    scenario: tuple[Op, ...] = ()


def explore(rule: Rule, first: World, bounds: Bounds) -> Found:
    """Breadth first, so that a violation is reached by one of the shortest scenarios. Members are interchangeable."""
    found = Found()
    seen = {_key(first)}
    decided: set[object] = set()
    queue: deque[tuple[World, _Path | None]] = deque([(first, None)])
    while queue:
        world, path = queue.popleft()
        found.num_worlds += 1
        is_last = world.generation == bounds.changes
        if is_last:
            final = _final_key(world)
            is_decided = final in decided
            decided.add(final)
        for op in possible(world, bounds, decides=not (is_last and is_decided)):
            try:
                if op.kind == "propose":
                    found.num_proposals += 1
                    if is_last:
                        rule.decide(world, op.fates, op.heard)
                        continue  # checked, and nothing comes after it
                after = perform(world, rule, op)
            except Impossible:
                continue
            except Violation as violation:
                return replace(found, violation=str(violation), scenario=_unwind((path, op)))
            key = _key(after)
            if key not in seen:
                seen.add(key)
                queue.append((after, (path, op)))
    return found


def possible(world: World, bounds: Bounds, decides: bool = True) -> Iterator[Op]:
    """A superset of what can happen next; `perform` raises Impossible for the rest. `decides`: proposals too."""
    fingerprints = set()
    for at, mem in enumerate(world.mems):
        if mem in fingerprints:
            continue  # what it can do, its double has done
        fingerprints.add(mem)
        if mem.running and mem.tip and mem.tip.step < bounds.steps and not mem.pending:
            yield Op("prepares", at)
        if mem.running and mem.pending in world.passed:
            yield Op("commits", at)
            yield Op("tears", at)
        if mem.running and mem.role == LEARNER:
            yield Op("activates", at)
            if mem.tip is None:
                yield from (Op("reduces", at, pending=attempt) for attempt in world.votes)
                yield from (Op("heals", at, other) for other in range(len(world.mems)))
        if not mem.running and mem.seat > mem.generation:
            yield Op("enters", at)
            yield Op("tears-entering", at)
    if not decides:
        return
    news = world.committed.difference(history(world, world.record.committed))
    for fates in _fates(world, is_last=world.generation == bounds.changes):
        for heard in (None, *sorted(news)):
            yield Op("propose", fates=fates, heard=heard)


def _fates(world: World, is_last: bool) -> Iterator[tuple[str, ...]]:
    """Every choice of who asks, who is away and who is dead, members in the same state being interchangeable.

    Nothing comes after the last decision, so whoever is not there is as good as dead if no active member is there, and
    otherwise alive, which forbids more.
    """
    groups: dict[Mem, list[int]] = {}
    for at, mem in enumerate(world.mems):
        groups.setdefault(mem, []).append(at)
    choices = [
        itertools.combinations_with_replacement((PRESENT, AWAY) if is_last or mem.is_new else FATES, len(ats))
        for mem, ats in groups.items()
    ]
    for chosen in itertools.product(*choices):
        fate_of = dict(zip(itertools.chain(*groups.values()), itertools.chain(*chosen), strict=True))
        fates = tuple(fate_of[at] for at in range(len(world.mems)))
        if is_last and not any(
            fate == PRESENT and mem.is_witness(world.generation) for mem, fate in zip(world.mems, fates, strict=True)
        ):
            fates = tuple(DIES if fate == AWAY else fate for fate in fates)
        yield fates


def _key(world: World) -> object:
    """Equal for worlds that differ only in who is who, or in what can matter no more."""
    named = {attempt for mem in world.mems for attempt in (mem.tip, mem.pending) if attempt}
    past = set(history(world, world.record.committed))
    kept = past.union(*(history(world, attempt) for attempt in named))
    running = {mem.generation for mem in world.mems if mem.running}
    return (
        tuple(sorted(map(number, world.mems))),
        world.generation,
        world.record,
        frozenset((mem.seat, world.records[mem.seat - 1]) for mem in world.mems if mem.seat > mem.generation),
        frozenset(item for item in world.base.items() if item[0] in kept),
        frozenset(item for item in world.voters.items() if item[0] in running),
        frozenset(item for item in world.votes.items() if item[0].generation in running),
        frozenset(attempt for attempt in world.passed if attempt.generation in running),
        world.committed - past,
        world.rolled_back,
        world.given_up,
    )


def _final_key(world: World) -> object:
    """Equal for worlds in which a decision, if it is the last, comes out alike: only what members say then matters."""
    generation, past = world.generation, set(history(world, world.record.committed))
    said = (
        (mem.tip, mem.pending, mem.seat == generation, mem.is_active(generation), mem.is_witness(generation), mem.part)
        for mem in world.mems
    )
    named = {attempt for mem in world.mems for attempt in (mem.tip, mem.pending) if attempt}
    kept = past.union(*(history(world, attempt) for attempt in named | world.committed))
    base = frozenset(item for item in world.base.items() if item[0] in kept)
    truth = world.record, world.committed - past, world.rolled_back, world.given_up
    return tuple(sorted(map(number, said))), base, truth


_NUMBERS: dict[object, int] = {}


def number(said: object) -> int:
    """Members are sorted by these: `None` does not compare."""
    return _NUMBERS.setdefault(said, len(_NUMBERS))


_Path: TypeAlias = "tuple[_Path | None, Op]"


def _unwind(path: _Path | None) -> tuple[Op, ...]:
    ops: list[Op] = []
    while path is not None:
        path, op = path
        ops.append(op)
    return tuple(reversed(ops))
