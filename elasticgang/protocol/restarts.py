"""Decides whether a rank whose script has failed is restarted, or the job ends.

Pure: the time is an argument. A failure is an exception, a non-zero exit code or a crash of the script. A kill from
outside is not a failure, and neither is an error that a lost peer caused.

RESTART-1  A failure ends the job if the rank has never committed a step: its script does not work.
RESTART-2  A step that fails a second time, on any rank of any host, ends the job: no single machine is at fault. A rank
           whose state is damaged (COMPARE-5), or that cannot heal (MANAGER-21), does not count: several may at once.
RESTART-3  A restarted rank that fails before its first step is given up if it has failed in this way before, since its
           last committed step: the others train, and it would not with what it finds now, such as an edited script.
RESTART-4  Otherwise a rank is restarted, `max_restarts` times in `WINDOW_S`; the next failure ends the job. With 0, the
           first failure does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_S = 3600.0


@dataclass(frozen=True)
class Failure:
    """A failure of `member`, a process of the rank `local_rank`. `step`: the last one it began; None: it began none.
    `heals`: its state was damaged, or it had none and could not heal."""

    member: str
    local_rank: int
    step: int | None
    at_s: float
    heals: bool = False


@dataclass
class Restarts:
    """The failures of the ranks of one host."""

    max_restarts: int
    _have_committed: set[int] = field(default_factory=set)
    _failed_early: set[int] = field(default_factory=set)
    _failed_at_s: dict[int, list[float]] = field(default_factory=dict)
    _failed_in: dict[int, dict[str, str]] = field(default_factory=dict)  # step -> member -> its rank, for messages

    def committed(self, local_rank: int) -> None:
        """A process of this rank has committed a step."""
        self._have_committed.add(local_rank)
        self._failed_early.discard(local_rank)

    def failed(self, failure: Failure) -> str | None:
        """Why the job ends, as the continuation of "rank 1 exited with code 1". None: restart the rank."""
        rank, step = failure.local_rank, failure.step
        since_s = failure.at_s - WINDOW_S
        recent = self._failed_at_s[rank] = [at_s for at_s in self._failed_at_s.get(rank, ()) if at_s > since_s]
        recent.append(failure.at_s)
        if step is None:
            self._failed_early.add(rank)
        before = None if step is None or failure.heals else self._add(step, failure.member, f"rank {rank}")
        if self.max_restarts == 0:
            return "; --max-restarts is 0"
        if rank not in self._have_committed:  # RESTART-1
            return " before its first committed step"
        if before is not None:  # RESTART-2
            return f" in step {step}, in which {before} had failed too"
        if len(recent) > self.max_restarts:  # RESTART-4
            return f"; --max-restarts is {self.max_restarts} for each rank in an hour"
        return None

    def gives_up(self, failure: Failure) -> bool:
        """RESTART-3. To be asked before `failed`."""
        rank = failure.local_rank
        is_early = failure.step is None and rank in self._have_committed and self.max_restarts > 0
        return is_early and rank in self._failed_early

    def failed_elsewhere(self, member: str, rank: str, step: int) -> str | None:
        """Why the job ends after a failure of `member` on another host; None: it goes on. `rank`: its rank, for
        messages."""
        before = self._add(step, member, rank)
        return None if before is None else f"{rank} failed in step {step}, in which {before} had failed too"

    def num_recent(self, local_rank: int) -> int:
        """Failures of the rank in the last `WINDOW_S`, as of its last failure."""
        return len(self._failed_at_s.get(local_rank, ()))

    def _add(self, step: int, member: str, rank: str) -> str | None:
        """The rank of another process that has failed in `step`. A repeated notice counts once."""
        failed = self._failed_in.setdefault(step, {})
        others = [failed[other] for other in failed if other != member]
        failed[member] = rank
        return others[0] if others else None
