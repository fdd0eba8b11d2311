"""Scenarios of a job under coordinators that decide, and failures made short. The format is that of `scenario.py`, with

hosts 1 1 ; tp=2 across ; directory     # the first coordinator has a state directory
operator starts one without             # a coordinator, without one
clock passes 15                         # 15 times 0.9 s
recover                                 # all faults end: the job must go on
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from elasticgang.simulation import scenario as base
from elasticgang.simulation.cluster import Move, Setting
from elasticgang.simulation.coordinated_cluster import CoordinatedCluster, is_rare_move
from elasticgang.simulation.coordinated_schedule import calm
from elasticgang.simulation.invariants import Violation
from elasticgang.simulation.schedule import Failure

_MAX_ROUNDS = 500
_MAX_TRIES = 3000
RECOVER: Move = ("all", "recovers")


def replay(setting: Setting, has_directory: bool, moves: Sequence[Move]) -> tuple[list[Move], str]:
    """What of `moves` is possible and was done, and the violation it led to, if any."""
    cluster = CoordinatedCluster(setting, has_directory)
    done: list[Move] = []
    for move in moves:
        if move != RECOVER and not cluster.is_possible(move):
            continue
        done.append(move)
        try:
            if move == RECOVER:
                recover(cluster)
            else:
                cluster.perform(move)
        except Violation as violation:
            return done, str(violation)
    return done, ""


def recover(cluster: CoordinatedCluster) -> None:
    """Raises Violation when the job does not go on, with every process in its turn."""
    turn = 0

    def pick(options: Sequence[Move]) -> Move:
        nonlocal turn
        turn += 1
        return options[turn % len(options)]

    calm(cluster, cluster.perform, pick, cluster.setting.layout.unit + cluster.setting.num_spares)


def shrink(failure: Failure, has_directory: bool, max_tries: int = _MAX_TRIES) -> Failure:
    """A violation of the same rule with as few moves as can be had by leaving some out."""
    rule = failure.violation.split(":")[0]
    moves, violation = list(failure.moves), failure.violation
    if rule == "RULE-7":
        moves.append(RECOVER)
        done, found = replay(failure.setting, has_directory, moves)
        if found.split(":")[0] != rule:
            return failure
        moves, violation = done, found
    moves, violation = base.shorten(
        moves, violation, lambda kept: replay(failure.setting, has_directory, kept), max_tries
    )
    return Failure(failure.seed, failure.setting, tuple(moves), violation)


def write(failure: Failure, has_directory: bool, why: str = "") -> str:
    """`failure` as a scenario, with what is told in it by the rules of now."""
    head = [f"# {line}" for line in textwrap.wrap(why, 110)] or [f"# Seed {failure.seed}."]
    head.append(f"hosts {base._format_setting(failure.setting)}" + " ; directory" * has_directory)
    commands = ["recover" if move == RECOVER else " ".join(move) for move in failure.moves]
    if failure.violation.startswith("RULE-7: ") and "recover" not in commands:
        commands.append("recover")
    lines = [*head, *base._wrap(commands)]
    return "\n".join([*lines, "----", *play("\n".join(lines))]) + "\n"


def play(text: str) -> list[str]:
    """What is told in the scenario `text`, up to the first violation, which comes last.

    Raises:
        ValueError: a line is not one, or its move cannot be made there.
    """
    first, *commands = base._commands(text)
    if not first.startswith("hosts "):
        raise ValueError(f"a scenario begins with `hosts`, but this one with {first!r}")
    has_directory = "directory" in commands
    commands = [command for command in commands if command != "directory"]
    cluster: CoordinatedCluster | None = None
    for command in base._setting_first(first, commands):
        if isinstance(command, Setting):
            cluster = CoordinatedCluster(command, has_directory)
            continue
        assert cluster is not None
        try:
            _carry_out(cluster, command)
        except Violation as violation:
            return [*cluster.log, str(violation)]
    assert cluster is not None
    return [*cluster.log, cluster.holdings()]


def _carry_out(cluster: CoordinatedCluster, command: str) -> None:
    word, _, rest = command.partition(" ")
    if command == "recover":
        recover(cluster)
    elif word == "settle":
        _settle(cluster, rest.split())
    elif word == "step":
        for _ in range(int(rest or 1)):
            _settle(cluster, [])
            for name, verb in list(_moves(cluster, steps=True)):
                if verb == "begins":
                    cluster.perform((name, verb))
            _settle(cluster, [])
    else:
        move = base._read_move(command)
        if not cluster.is_possible(move):
            moves = [cluster.moves_of(actor) for actor in cluster.actors if actor.name == move[0]]
            possible = ", ".join(could[0] for could in moves if could)
            raise ValueError(f"`{command}` is not possible; {move[0]} could: {possible or 'do nothing'}")
        cluster.perform(move)


def _moves(cluster: CoordinatedCluster, steps: bool) -> Iterator[Move]:
    for actor in list(cluster.actors):
        for verb in cluster.moves_of(actor):
            if not is_rare_move(verb) and (steps or verb != "begins"):
                yield actor.name, verb
                break


def _settle(cluster: CoordinatedCluster, without: Sequence[str]) -> None:
    """In turn, every process does what comes by itself, but for those of `without` and their ranks."""
    for _ in range(_MAX_ROUNDS):
        did = False
        for name, verb in list(_moves(cluster, steps=False)):
            home = cluster.ranks[name].host if name in cluster.ranks else name
            if home not in without and cluster.is_possible((name, verb)):
                cluster.perform((name, verb))
                did = True
        if not did:
            return
    raise ValueError("it does not settle")
