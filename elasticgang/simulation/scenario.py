"""Scenarios: a job's story as text that replays, and failures made short.

    # Comments.
    hosts 2 1 ; tp=2 across ; steps 9       # a with two ranks, b with one; the layout; when the job is done
    spares 1 ; at-least 2 ; at-most 3       # of each host's ranks, one more than seats are asked for; how many hosts
    step 2                                  # two steps, by all who are in a generation
    a0 dies ; run-until-idle                        # a move; then all that happens by itself, up to the beginning of a
    step until b0 prepares                       # the same, and steps too, until that move can be made, and is
    ----
    generation 1  {a0 b0} learn c0  0@1     # what is told: records, undecided proposals, hosts that end; and who holds
    what

`across`: the axes of the layout may span hosts. An attempt is `step@generation`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from elasticgang.layout import ParallelLayout
from elasticgang.simulation.cluster import RARE_MOVES, Cluster, Move, Setting
from elasticgang.simulation.invariants import Violation
from elasticgang.simulation.schedule import Failure

_STILL = 5  # undecided answers in a row, after which nothing new is expected
_MAX_ROUNDS = 500
_MAX_TRIES = 1500  # to make a failure shorter
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
    """A violation of the same rule with as few moves as can be had by leaving some out. A standstill stays as it is."""
    rule = failure.violation.split(":")[0]
    if rule == "RULE-7":
        return failure
    moves, violation = shorten(failure.moves, failure.violation, lambda kept: replay(failure.setting, kept), _MAX_TRIES)
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
    head = [f"# Seed {failure.seed}.", f"hosts {_format_setting(failure.setting)}"]
    lines = [*head, *_wrap([" ".join(move) for move in failure.moves])]
    if failure.violation.startswith("RULE-7: "):  # told of at the top: a scenario only ends
        lines = [*textwrap.wrap(failure.violation, 110, initial_indent="# ", subsequent_indent="# "), *lines]
        lines += ["run-until-idle ; step"]
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
    cluster: Cluster | None = None
    for command in _setting_first(first, commands):
        if isinstance(command, Setting):
            cluster = Cluster(command)
            continue
        assert cluster is not None
        try:
            _carry_out(cluster, command)
        except Violation as violation:
            return [*cluster.log, str(violation)]
    assert cluster is not None
    return [*cluster.log, cluster.holdings()]


def _commands(text: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [" ".join(part.split()) for line in lines for part in line.split(";") if part.strip()]


def _setting_first(first: str, commands: list[str]) -> Iterator[Setting | str]:
    facts = []
    while commands and (commands[0].split()[0] in _NUMBERS or "=" in commands[0]):
        facts.append(commands.pop(0))
    yield _read_setting(first, facts)
    yield from commands


def _read_setting(first: str, facts: Sequence[str]) -> Setting:
    hosts = tuple(int(word) for word in first.split()[1:])
    layout, numbers = ParallelLayout(), {}
    for fact in facts:
        words = fact.split()
        if words[0] in _NUMBERS:
            numbers[_NUMBERS[words[0]]] = int(words[1])
            continue
        sizes = {name: int(size) for name, size in (word.split("=") for word in words if "=" in word)}
        layout = ParallelLayout(**sizes, within_host=() if "across" in words else ("tp",))  # type: ignore[arg-type]
    return Setting(layout, hosts, **numbers)


def _format_setting(setting: Setting) -> str:
    layout = setting.layout
    sizes = [f"{axis}={getattr(layout, axis)}" for axis in ("pp", "sdp", "tp") if getattr(layout, axis) > 1]
    parts = [" ".join(map(str, setting.hosts))]
    if sizes:
        parts.append(" ".join([*sizes, *([] if layout.within_host else ["across"])]))
    parts += [
        f"{word} {getattr(setting, name)}"
        for word, name in _NUMBERS.items()
        if getattr(setting, name) != getattr(Setting, name)
    ]
    return " ; ".join(parts)


def _carry_out(cluster: Cluster, command: str) -> None:
    word, _, rest = command.partition(" ")
    if command == "run-until-idle":
        _run_until_idle(cluster)
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
            moves = [actor.moves(cluster) for actor in cluster.actors if actor.name == move[0]]
            possible = ", ".join(could[0] for could in moves if could)
            raise ValueError(f"`{command}` is not possible; {move[0]} could: {possible or 'do nothing'}")
        cluster.perform(move)


def _read_move(text: str) -> Move:
    name, _, verb = text.partition(" ")
    return name, verb


def _moves(cluster: Cluster, steps: bool) -> Iterator[Move]:
    """What can happen by itself; for each who can do something, the first of it."""
    for actor in list(cluster.actors):
        for verb in actor.moves(cluster):
            if verb not in RARE_MOVES and (steps or verb != "begins"):
                yield actor.name, verb
                break


def _run_until_idle(cluster: Cluster, steps: bool = False, until: Callable[[], bool] = lambda: False) -> bool:
    """In turn, everybody does what comes by itself. Returns whether `until` has come."""
    cluster.num_void = 0
    for _ in range(_MAX_ROUNDS):
        if until():
            return True
        moves = list(_moves(cluster, steps))
        if not moves or cluster.num_void >= _STILL:
            return False
        for move in moves:
            if until():
                return True
            if cluster.is_possible(move):
                cluster.perform(move)
    raise ValueError("it does not become idle")
