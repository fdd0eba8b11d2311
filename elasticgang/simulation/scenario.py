"""Scenarios: a job's story as text that replays, and failures made short.

    # Comments.
    hosts 2 1 ; tp=2 across ; steps 9       # a with two ranks, b with one; the layout; when the job is done
    sdp=2 | pp=1                            # a layout, and one to fall back to
    spares 1 ; at-least 2 ; at-most 3       # of each host's ranks, one more than seats are asked for; how many hosts
    directory                               # the first coordinator has a state directory
    keeps ; checkpoints                     # ranks keep the gradients of slots; the final state is saved
    step 2                                  # two steps, by all who are in a generation
    a0 dies ; run-until-idle                # a move; then all that happens by itself, up to the beginning of a step
    run-until-idle but b coordinator1 a1    # the same, of all but these, and the ranks of a host
    until b0 prepares                       # the same, and steps too, until that move can be made, and is
    recover                                 # all faults end, and the job must go on
    recover unattended                      # the same, without an operator
    clock passes 15                         # 15 times 0.9 s
    ----
    generation 1  {a0 b0} learn c0  0@1     # what is told: records, undecided proposals, hosts that end; and who holds
    what

`across`: the axes of the layout may span hosts. An attempt is `step@generation`.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from elasticgang.layout import ParallelLayout
from elasticgang.simulation.cluster import Cluster, Move, Setting
from elasticgang.simulation.invariants import Violation
from elasticgang.simulation.schedule import Failure

_MAX_ROUNDS = 500
_MAX_TRIES = 3000  # to make a failure shorter
RECOVER: Move = ("recover", "")
_FLAGS = {"directory": "has_directory", "keeps": "keeps", "checkpoints": "saves_last"}
_NUMBERS = {"steps": "num_steps", "spares": "num_spares", "at-least": "min_hosts", "at-most": "max_hosts"}


def replay(setting: Setting, moves: Sequence[Move]) -> tuple[list[Move], str]:
    """What of `moves` is possible and was done, and the violation it led to, if any."""
    cluster = Cluster(setting)
    done = []
    for move in moves:
        if not cluster.is_possible(move):
            continue
        done.append(move)
        try:
            cluster.perform(move)
        except Violation as violation:
            return done, str(violation)
    return done, ""


def shrink(failure: Failure) -> Failure:
    """A violation of the same rule with as few moves as can be had by leaving some out."""
    rule = failure.violation.split(":")[0]
    moves, violation = list(failure.moves), failure.violation
    if rule == "RULE-7":
        moves, violation = replay(failure.setting, [*moves, RECOVER])
        if violation.split(":")[0] != rule:
            return failure
    moves, violation = shorten(moves, violation, lambda kept: replay(failure.setting, kept), _MAX_TRIES)
    return Failure(failure.seed, failure.setting, tuple(moves), violation)


def shorten(
    moves: Sequence[Move], violation: str, replay: Callable[[Sequence[Move]], tuple[list[Move], str]], max_tries: int
) -> tuple[list[Move], str]:
    """Fewer `moves` that break the same rule as `violation`, and how they break it. `replay`: as the function of that
    name."""
    moves, rule, num_tries = list(moves), violation.split(":")[0], 0

    def leave_out(kept: list[Move]) -> bool:
        nonlocal moves, violation, num_tries
        num_tries += 1
        done, found = replay(kept)
        if found.split(":")[0] != rule or len(done) >= len(moves):
            return False
        moves, violation = done, found
        return True

    length = len(moves) + 1
    while len(moves) < length and num_tries < max_tries:  # again: a move may be needed only by another
        length = len(moves)
        for actor in dict.fromkeys(actor for actor, _ in moves):
            leave_out([move for move in moves if move[0] != actor])
        for size in _sizes(len(moves)):
            start = 0
            while start < len(moves) and num_tries < max_tries:
                if not leave_out([*moves[:start], *moves[start + size :]]):
                    start += max(1, size // 4)
    return moves, violation


def _sizes(num_moves: int) -> Iterator[int]:
    size = num_moves // 2
    while size:
        yield size
        size //= 2


def write(failure: Failure) -> str:
    """`failure` as a scenario with what is told, so that it can be kept as it is once it is mended."""
    moves = list(failure.moves)
    head = [f"# Seed {failure.seed}.", f"hosts {_format_setting(failure.setting)}"]
    if failure.violation.startswith("RULE-7: "):  # told of at the top: a scenario only ends
        head = [*textwrap.wrap(failure.violation, 110, initial_indent="# ", subsequent_indent="# "), *head]
        if RECOVER not in moves:
            moves.append(RECOVER)
    lines = [*head, *_wrap([" ".join(move).strip() for move in moves])]
    return "\n".join([*lines, "----", *play("\n".join(lines))]) + "\n"


def _wrap(moves: Sequence[str], width: int = 110) -> Iterator[str]:
    line = ""
    for move in moves:
        if line and len(line) + len(move) + 3 > width:
            yield line
            line = ""
        line += f" ; {move}" if line else move
    if line:
        yield line


def read(text: str) -> tuple[str, list[str]]:
    """The story in a file, and what it is expected to tell."""
    story, _, told = text.partition("\n----\n")
    return story, told.splitlines()


def play(text: str) -> list[str]:
    """What is told in the scenario `text`, up to the first violation, which comes last.

    Raises:
        ValueError: a line is not one, or its move cannot be made there.
    """
    first, *commands = _commands(text)
    if not first.startswith("hosts "):
        raise ValueError(f"a scenario begins with `hosts`, but this one with {first!r}")
    facts = list(itertools.takewhile(_is_fact, commands))
    cluster = Cluster(_read_setting(first, facts))
    try:
        for command in commands[len(facts) :]:
            _carry_out(cluster, command)
    except Violation as violation:
        return [*cluster.log, str(violation)]
    return [*cluster.log, cluster.holdings()]


def _commands(text: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [" ".join(part.split()) for line in lines for part in line.split(";") if part.strip()]


def _is_fact(command: str) -> bool:
    return command.split()[0] in (*_NUMBERS, *_FLAGS) or "=" in command


def _read_setting(first: str, facts: Sequence[str]) -> Setting:
    hosts = tuple(int(word) for word in first.split()[1:])
    layout = ParallelLayout()
    others: dict[str, int] = {}
    for fact in facts:
        words = fact.split()
        if words[0] in _NUMBERS:
            others[_NUMBERS[words[0]]] = int(words[1])
            continue
        if words[0] in _FLAGS:
            others[_FLAGS[words[0]]] = True
            continue
        layout, *fallback = (_read_layout(option.split()) for option in fact.split("|"))
        layout = replace(layout, fallback=tuple(fallback))
    return Setting(layout, hosts, **others)  # type: ignore[arg-type]


def _read_layout(words: Sequence[str]) -> ParallelLayout:
    sizes = {name: int(size) for name, size in (word.split("=") for word in words if "=" in word)}
    return ParallelLayout(**sizes, within_host=() if "across" in words else ("tp",))  # type: ignore[arg-type]


def _format_layout(layout: ParallelLayout) -> str:
    named = {axis: getattr(layout, axis) for axis in ("pp", "sdp", "tp", "min_replicas")}
    sizes = [f"{axis}={size}" for axis, size in named.items() if size > 1] or ["pp=1"]
    return " ".join([*sizes, *([] if layout.within_host else ["across"])])


def _format_setting(setting: Setting) -> str:
    parts = [" ".join(map(str, setting.hosts))]
    if setting.layout != ParallelLayout():
        parts.append(" | ".join(map(_format_layout, setting.layout.options)))
    parts += [
        f"{word} {getattr(setting, name)}"
        for word, name in _NUMBERS.items()
        if getattr(setting, name) != getattr(Setting, name)
    ]
    parts += [word for word, name in _FLAGS.items() if getattr(setting, name)]
    return " ; ".join(parts)


def _carry_out(cluster: Cluster, command: str) -> None:
    word, _, rest = command.partition(" ")
    if command == "run-until-idle" or command.startswith("run-until-idle but "):
        _run_until_idle(cluster, without=rest.split()[1:])
    elif word == "step":
        for _ in range(int(rest or 1)):
            _run_until_idle(cluster)
            for rank in list(cluster.ranks.values()):
                if (rank.name, "begins") in _moves(cluster, steps=True):
                    cluster.perform((rank.name, "begins"))
            _run_until_idle(cluster)
    elif word == "until":
        wanted = _read_move(rest)
        if not _run_until_idle(cluster, steps=True, until=lambda: cluster.is_possible(wanted)):
            raise ValueError(f"`{rest}` does not come")
        cluster.perform(wanted)
    else:
        move = _read_move(command)
        if not cluster.is_possible(move):
            moves = [cluster.moves_of(actor) for actor in cluster.actors if actor.name == move[0]]
            possible = ", ".join(could[0] for could in moves if could)
            raise ValueError(f"`{command}` is not possible; {move[0]} could: {possible or 'do nothing'}")
        cluster.perform(move)


def _read_move(text: str) -> Move:
    name, _, verb = text.partition(" ")
    return name, verb


def _moves(cluster: Cluster, steps: bool, without: Collection[str] = ()) -> Iterator[Move]:
    """What can happen by itself; for each who can do something, the first of it."""
    for actor in list(cluster.actors):
        if actor.home in without or actor.name in without:
            continue
        for verb in cluster.moves_of(actor):
            if not cluster.is_rare(verb) and (steps or verb != "begins"):
                yield actor.name, verb
                break


def _run_until_idle(
    cluster: Cluster, steps: bool = False, until: Callable[[], bool] = lambda: False, without: Collection[str] = ()
) -> bool:
    """In turn, everybody but `without` does what comes by itself. Returns whether `until` has come."""
    for _ in range(_MAX_ROUNDS):
        if until():
            return True
        moves = list(_moves(cluster, steps, without))
        if not moves:
            return False
        for move in moves:
            if until():
                return True
            if cluster.is_possible(move):
                cluster.perform(move)
    raise ValueError("it does not become idle")
