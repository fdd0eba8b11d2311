"""Which jobs run on this host: a file for each agent of this user, in one directory.

LISTED-1  An agent holds a lock on its file for as long as it lives. The kernel releases it, however the agent ends.
LISTED-2  Only the owner can write into the directory. An agent without such a directory runs unlisted, and a directory
    of another user lists nothing.
LISTED-3  An agent that is not listed here runs if the directory of its events is locked (LOGLOCK-1). Otherwise nobody
    knows: it has ended, or it runs where its lock is not seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticgang.environment import is_own_directory, run_dir
from elasticgang.errors import OperationalError
from elasticgang.observe import log_lock

EVENTS = "events.jsonl"
_SUFFIX = ".agent.json"
_KEPT_S = 24 * 3600.0  # how long the events of a job that has ended are kept


@dataclass(frozen=True)
class ListedAgent:
    """`log_dir`: the directory of its events."""

    job: str
    pid: int
    log_dir: Path
    is_alive: bool
    began_at: float


@contextlib.contextmanager
def listed(job: str, log_dir: str | None) -> Iterator[str]:
    """List this process as an agent of `job`, and yield its `log_dir`: if that is None, a directory beside its file,
    which a later agent deletes.

    Raises:
        OperationalError: the directory cannot be used (LISTED-2).
    """
    name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    directory = run_dir()
    own = Path(log_dir).absolute() if log_dir is not None else directory / name
    entry = {"job": job, "pid": os.getpid(), "log_dir": str(own), "began_at": time.time()}
    try:
        _make(directory)  # LISTED-2
        _prune(directory)
        draft = directory / f"{name}.draft"
        file = draft.open("x")
        file.write(json.dumps(entry))
        file.flush()
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # LISTED-1: of the process, so that no fork keeps it
        draft.rename(directory / f"{name}{_SUFFIX}")
    except OSError as exc:
        raise OperationalError(f"{directory} cannot be used: {exc.strerror or exc}") from exc
    with file:
        yield str(own)


def _make(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own_directory(directory):  # LISTED-2
        raise OperationalError(f"{directory} must be a directory that only this user can write to")


def find(what: str | None) -> list[tuple[Path, Callable[[], bool | None]]]:
    """The event files of the agents to show, and whether each agent runs; None: nobody knows. `what`: a job's name, or
    the directory or file of its events; None for all agents that run."""
    listed = _listed()
    if what is None:
        chosen = [each for each in listed if each[1].is_alive]
    elif not (chosen := [each for each in listed if each[1].job == what]):
        path = Path(what).absolute()
        directory = path.parent if path.name == EVENTS else path
        chosen = [each for each in listed if each[1].log_dir == directory][-1:]  # the newest writes to it
        if not chosen:
            found = [each for each in (path, path / EVENTS) if each.is_file()]
            return [(each, functools.partial(_is_unlisted_alive, each)) for each in found]
    return [(agent.log_dir / EVENTS, functools.partial(_is_alive, path)) for path, agent in chosen]


def is_running(path: Path) -> bool | None:
    """Whether the newest agent that writes this event file runs. None: nobody knows."""
    agents = [agent for _, agent in _listed() if agent.log_dir / EVENTS == path.absolute()]
    return agents[-1].is_alive if agents else _is_unlisted_alive(path)


def newest(what: str | None) -> Path | None:
    """The event file of the newest agent of that job, see `find`. `what` is None: of all agents that run, or, if none
    does, that have run; one without events is left out."""
    if what is not None:
        return next((path for path, _ in reversed(find(what)) if path.is_file()), None)
    for _, agent in reversed(_listed()):
        if (path := agent.log_dir / EVENTS).is_file():
            return path
    return None


def _listed() -> list[tuple[Path, ListedAgent]]:
    """The newest last: one that runs is newer than one that has ended, whatever a clock that was set says."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths = list(run_dir().glob(f"*{_SUFFIX}")) if is_own_directory(run_dir()) else []
    found = [(path, agent) for path in paths if (agent := _read(path)) is not None]
    return sorted(found, key=lambda each: (each[1].is_alive, each[1].began_at))


def _is_unlisted_alive(events: Path) -> bool | None:
    """LISTED-3. Another file beside the events has older ones, or those of a copy."""
    is_held = events.name == EVENTS and log_lock.holder(str(events.parent)) is not None
    return True if is_held else None


def _is_alive(path: Path) -> bool:
    agent = _read(path)
    return agent is not None and agent.is_alive


def _read(path: Path) -> ListedAgent | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path, opener=_open_regular) as file:
        entry: dict[str, Any] = json.load(file)
        return ListedAgent(
            str(entry["job"]), int(entry["pid"]), Path(entry["log_dir"]), _is_locked(file.fileno()), entry["began_at"]
        )
    return None


def _open_regular(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is no file")
    return fd


def _is_locked(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _prune(directory: Path) -> None:
    """Delete the files of agents that ended long ago."""
    for path in directory.glob(f"*{_SUFFIX}"):
        own = directory / path.name.removesuffix(_SUFFIX)
        with contextlib.suppress(OSError):
            newest = path.stat().st_mtime  # raises if another agent that starts now has deleted it
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, (own / EVENTS).stat().st_mtime)
            agent = _read(path)
            if newest < time.time() - _KEPT_S and not (agent and agent.is_alive):
                shutil.rmtree(own, ignore_errors=True)
                path.unlink()
