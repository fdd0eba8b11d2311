"""The state directory of a coordinator: each job's term, its newest decision, and whether the job has finished.

STATE-LOCK   One process at a time holds a directory, from before its first read until it exits.
STATE-WHOLE  `write` replaces a file atomically and returns once it is on disk. A crash leaves the old or the new file.
STATE-PROBE  A directory on whose disk nothing can be written is refused at the start, not at the first decision.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from elasticgang.errors import OperationalError, reason_of
from elasticgang.protocol.coordinator_messages import NO_TERM, Decision, Term
from elasticgang.session.messages import decision_from_json, decision_to_json

_LOCK = "lock"
_PROBE = "probe"
_PROBE_BYTES = 1 << 16


class Kept(NamedTuple):
    """The persistent state of one job. `addresses`: of the coordinators that have used it since the decision. `own`: as
    of `Persist`."""

    term: Term = NO_TERM
    decision: Decision | None = None
    finished: bool = False
    addresses: frozenset[str] = frozenset()
    own: bool = False


class StateDirectory:
    """Reads and writes one file per job."""

    def __init__(self, path: Path) -> None:
        """Raises OperationalError: the directory cannot be used, or another process holds it (STATE-LOCK)."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OperationalError(f"the state directory {path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise OperationalError(f"another coordinator holds the state directory {path}") from error
        except OSError as error:  # a file system without locks, say
            os.close(self._lock)
            raise OperationalError(f"the state directory {path} cannot be locked: {error.strerror}") from error
        try:
            _probe(path / _PROBE)
        except OSError as error:
            os.close(self._lock)
            raise OperationalError(f"the state directory {path} cannot be written to: {reason_of(error)}") from error

    def close(self) -> None:
        os.close(self._lock)

    def read(self, job: str) -> Kept:
        """The state of `job`; `Kept()` for an unknown one. Raises OperationalError: the file cannot be read or is
        damaged, and an operator must decide how the job continues."""
        path = self._path(job)
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["job"] != job:
                raise ValueError("it belongs to another job")
            number, name = fields["term"]
            decision = None if fields["decision"] is None else decision_from_json(fields["decision"], True)
            addresses = frozenset(str(address) for address in fields["addresses"])
            return Kept(
                Term(int(number), str(name)), decision, bool(fields["finished"]), addresses, bool(fields["own"])
            )
        except FileNotFoundError:
            return Kept()
        except OSError as error:
            raise OperationalError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise OperationalError(f"{path} is damaged ({error}): move it away to begin job {job} anew") from error

    def write(self, job: str, kept: Kept) -> None:
        """Replace the state of `job` (STATE-WHOLE). Raises OSError, with the job and the directory."""
        decision = None if kept.decision is None else decision_to_json(kept.decision)
        fields = {"job": job, "term": kept.term, "decision": decision, "finished": kept.finished}
        text = json.dumps({**fields, "addresses": sorted(kept.addresses), "own": kept.own})
        try:
            self._replace(self._path(job), text)
        except OSError as error:
            what = f"the state of job {job} cannot be written to {self.path}"
            raise OSError(error.errno, f"{what}: {reason_of(error)}") from error

    def _replace(self, path: Path, text: str) -> None:
        """STATE-WHOLE."""
        new = path.with_suffix(".new")
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _path(self, job: str) -> Path:
        return self.path / f"{hashlib.sha256(job.encode()).hexdigest()[:32]}.json"


def _probe(path: Path) -> None:
    """STATE-PROBE. Raises OSError."""
    try:
        with open(path, "wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
