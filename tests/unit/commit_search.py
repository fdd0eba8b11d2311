"""All that can happen to the job of `commit_model.py`, searched breadth first."""

from __future__ import annotations

import functools
import gc
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
    gc.disable()  # there are no cycles to find, in millions of objects
    try:
        return _explore(rule, first, bounds)
    finally:
        gc.enable()


def _explore(rule: Rule, first: World, bounds: Bounds) -> Found:
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
    firsts: dict[Mem, int] = {}
    doubles = tuple([firsts.setdefault(mem, at) for at, mem in enumerate(world.mems)])
    for at, mem in enumerate(world.mems):
        if doubles[at] != at:
            continue  # what it can do, its double has done
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
    generation = world.generation
    if generation == bounds.changes:
        choices = _last_fates(doubles, tuple([mem.is_witness(generation) for mem in world.mems]))
    else:
        choices = _fates(doubles, tuple([mem.is_new for mem in world.mems]))
    known = (None, *sorted(news))
    for fates in choices:
        for heard in known:
            yield Op("propose", fates=fates, heard=heard)


@functools.cache
def _fates(doubles: tuple[int, ...], cannot_die: tuple[bool, ...]) -> list[tuple[str, ...]]:
    """Every choice of who asks, who is away and who is dead. `doubles`: for each member, the first one in the same
    state, with which it is interchangeable. `cannot_die`: of each."""
    groups: dict[int, list[int]] = {}
    for at, first in enumerate(doubles):
        groups.setdefault(first, []).append(at)
    choices = [
        itertools.combinations_with_replacement((PRESENT, AWAY) if cannot_die[first] else FATES, len(ats))
        for first, ats in groups.items()
    ]
    order = [*itertools.chain(*groups.values())]
    fates = (dict(zip(order, itertools.chain(*chosen), strict=True)) for chosen in itertools.product(*choices))
    return [tuple(fate_of[at] for at in range(len(doubles))) for fate_of in fates]


@functools.cache
def _last_fates(doubles: tuple[int, ...], witnesses: tuple[bool, ...]) -> list[tuple[str, ...]]:
    """As `_fates`. Nothing comes after the last decision, so whoever is not there is as good as dead if no active
    member is there, and otherwise alive, which forbids more."""
    return [
        fates
        if any(fate == PRESENT and witness for fate, witness in zip(fates, witnesses, strict=True))
        else tuple(DIES if fate == AWAY else fate for fate in fates)
        for fates in _fates(doubles, (True,) * len(doubles))
    ]


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
_NUMBERED: list[object] = []


def number(said: object) -> int:
    """Members are sorted by these: `None` does not compare."""
    found = _NUMBERS.get(said)
    if found is None:
        found = _NUMBERS[said] = len(_NUMBERED)
        _NUMBERED.append(said)
    return found


def numbered(number: int) -> object:
    """What has that number."""
    return _NUMBERED[number]


_Path: TypeAlias = "tuple[_Path | None, Op]"


def _unwind(path: _Path | None) -> tuple[Op, ...]:
    ops: list[Op] = []
    while path is not None:
        path, op = path
        ops.append(op)
    return tuple(reversed(ops))
