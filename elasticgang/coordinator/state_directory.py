"""Where a coordinator keeps what it must not forget: each job's term, its newest decision, and whether it has finished.

STATE-LOCK   One process holds a directory at a time, from before it reads until it ends.
STATE-WHOLE  A file is replaced as a whole, and is on the disk when `write` returns: a crash leaves the former one, or
             the new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from elasticgang.errors import OperationalError
from elasticgang.protocol.coordinator_messages import NO_TERM, Decision, Term
from elasticgang.session.messages import decision_from_json, decision_to_json

_LOCK = "lock"


class Kept(NamedTuple):
    term: Term = NO_TERM
    decision: Decision | None = None
    finished: bool = False


class StateDirectory:
    """Raises OperationalError when the directory cannot be used, or another process holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OperationalError(f"the state directory {path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise OperationalError(f"another coordinator holds the state directory {path}") from error

    def close(self) -> None:
        os.close(self._lock)

    def read(self, job: str) -> Kept:
        """Raises OperationalError when the file is damaged: an operator must say what the job goes on from."""
        path = self._path(job)
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["job"] != job:
                raise ValueError("it is of another job")
            number, name = fields["term"]
            decision = None if fields["decision"] is None else decision_from_json(fields["decision"], True)
            return Kept(Term(int(number), str(name)), decision, bool(fields["finished"]))
        except FileNotFoundError:
            return Kept()
        except OSError as error:
            raise OperationalError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise OperationalError(f"{path} is damaged ({error}): move it away to begin job {job} anew") from error

    def write(self, job: str, kept: Kept) -> None:
        decision = None if kept.decision is None else decision_to_json(kept.decision)
        text = json.dumps({"job": job, "term": kept.term, "decision": decision, "finished": kept.finished})
        path = self._path(job)
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
