"""What a process does with the TLS files that it finds at a look, and what it says of them. Pure.

TLS-NEWEST  Files that have changed and pass the check of a start (TLS-SELF) are used by every handshake from then on.
            Sessions that are open go on.
TLS-WHOLE   Files that do not pass are not used: the process goes on with the earlier ones, and says why, once for each
            reason. It says so at the second such look in a row only: a look may come while the files are replaced.
TLS-ENDS    Of what is in use, the process says once that it ends soon, for the last quarter of its life and at most
            `MAX_EARLY_S`, and once that it has ended. cert-manager renews at the last third by default, and SPIRE at
            half, so that neither is late by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TypeAlias

MAX_EARLY_S = 86400.0
_EARLY_PART = 0.25
_MAX_SAID = 8  # reasons


@dataclass(frozen=True)
class Life:
    """From when to when a certificate is valid, in seconds since the epoch. `what`: its name in messages."""

    what: str
    begins_s: float
    ends_s: float

    @property
    def early_s(self) -> float:
        """From when on it ends soon (TLS-ENDS)."""
        return self.ends_s - min(MAX_EARLY_S, _EARLY_PART * (self.ends_s - self.begins_s))

    @property
    def end(self) -> str:
        return datetime.fromtimestamp(self.ends_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


@dataclass(frozen=True)
class Problem:
    """Files that have changed and cannot be used. `reason`: one clause."""

    reason: str


@dataclass(frozen=True)
class Renewed:
    """The new files are in use."""

    life: Life

    @property
    def text(self) -> str:
        return (
            f"the TLS files have changed, and new connections use them; {self.life.what} is valid until {self.life.end}"
        )


@dataclass(frozen=True)
class Refused:
    """The earlier files stay in use."""

    text: str


@dataclass(frozen=True)
class EndsSoon:
    life: Life
    left_s: float

    @property
    def text(self) -> str:
        return (
            f"{self.life.what} expires in {_in_words(self.left_s)}, at {self.life.end}: without a new one, new "
            "sessions and heals fail from then on"
        )


@dataclass(frozen=True)
class HasEnded:
    life: Life

    @property
    def text(self) -> str:
        return (
            f"{self.life.what} has expired, at {self.life.end}: open sessions go on, but new ones and heals fail "
            "until a new one is there"
        )


News: TypeAlias = Renewed | Refused | EndsSoon | HasEnded


class Rotation:
    """`life`: of what is in use at first; None: not known, and nothing is said of its end."""

    def __init__(self, life: Life | None) -> None:
        self._life = life
        self._num_refused = 0  # looks in a row
        self._said: set[str] = set()  # reasons, since the files could be used last
        self._said_early = self._said_ended = False

    def looked(self, found: Life | Problem | None, now_s: float) -> list[News]:
        """`found`: of files that have changed and can be used, which the caller has taken into use; or why they cannot;
        None: they are those in use. `now_s`: seconds since the epoch. Returns what to say."""
        news: list[News] = []
        match found:
            case Life():  # TLS-NEWEST
                self._accept()
                self._life, self._said_early, self._said_ended = found, False, False
                news.append(Renewed(found))
            case Problem(reason):
                news += self._refuse(reason)
            case None:
                self._accept()
        return news + self._ends(now_s)

    def _accept(self) -> None:
        self._num_refused = 0
        self._said.clear()

    def _refuse(self, reason: str) -> list[News]:
        """TLS-WHOLE"""
        self._num_refused += 1
        if self._num_refused < 2 or reason in self._said or len(self._said) >= _MAX_SAID:
            return []
        self._said.add(reason)
        return [Refused(f"{reason}; the earlier TLS files stay in use")]

    def _ends(self, now_s: float) -> list[News]:
        """TLS-ENDS"""
        life = self._life
        if life is None or self._said_ended or now_s < life.early_s:
            return []
        if now_s >= life.ends_s:
            self._said_ended = True
            return [HasEnded(life)]
        if self._said_early:
            return []
        self._said_early = True
        return [EndsSoon(life, life.ends_s - now_s)]


def _in_words(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
