"""What has waited for so long that somebody is to be told. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Overdue:
    """Knows what waits, by name: for which reason, and since when."""

    limit_s: float
    _waiting: dict[str, tuple[str, float]] = field(default_factory=dict)  # the reason, and since when

    def note(self, what: str, reason: str, now_s: float) -> None:
        """`what` waits for this reason, from now on if it did not before; empty: it does not wait."""
        if not reason:
            self._waiting.pop(what, None)
        elif self._waiting.get(what, ("", 0.0))[0] != reason:
            self._waiting[what] = reason, now_s

    def reason(self, what: str, now_s: float) -> str:
        """The reason for which `what` has waited for `limit_s`; empty: there is none."""
        reason, since_s = self._waiting.get(what, ("", now_s))
        return reason if now_s - since_s >= self.limit_s else ""
