"""Executes what `hang_monitor.py` finds: kills what hangs (RULE-8), and reports a standstill (HANG-5)."""

from __future__ import annotations

import asyncio
import time

from elasticgang.agent.change_log import ChangeLog
from elasticgang.agent.hang_monitor import kill_comm, read_status
from elasticgang.agent.job import Events, Output
from elasticgang.agent.rank_processes import RankProcess, RankProcesses
from elasticgang.process import stacks
from elasticgang.process.daemon_thread import in_daemon_thread
from elasticgang.protocol.hang_detector import CommHung, HangReport, Standstill, goes_on

_STACK_S = 1.0


class HangResponse:
    """Belongs to the agent's event loop. `is_reporting`: a standstill, until each rank's stack has been read."""

    def __init__(self, ranks: RankProcesses, changes: ChangeLog, events: Events, output: Output) -> None:
        self._ranks, self._changes, self._events, self._output = ranks, changes, events, output
        self.is_reporting = False
        self._killing: set[str] = set()  # members whose stack is being read

    async def kill(self, report: HangReport) -> None:
        """RULE-8. The agent restarts the rank, as after any kill. It reads the rank's stack before, for at most
        `_STACK_S`, and kills the rank also if it cannot read it, but not if it goes on meanwhile (HANG-6)."""
        rank = next(iter(self._ranks.of([report.member])), None)
        if rank is None or rank.member in self._killing:
            return
        stalled_s = report.stalled_ms / 1000
        began_at = time.monotonic() - stalled_s
        what = f"rank {rank.local_rank} (pid {rank.pid})"
        comm = report.pid if isinstance(report, CommHung) else None
        if comm is None:
            self._killing.add(rank.member)
            before = read_status(rank.member, rank.page)
            try:
                stack = await asyncio.wait_for(_stack_of(rank), _STACK_S)
            except asyncio.TimeoutError:
                stack = "its stack could not be read in time"
            finally:
                self._killing.discard(rank.member)
            if rank.status is not None or goes_on(before, read_status(rank.member, rank.page)):
                return  # it has exited, or does not hang any more
            self._changes.incidents.hung(rank.member, stack)
        self._events.write("hung", member=rank.member, local_rank=rank.local_rank, pid=rank.pid, comm=comm)
        if comm is None:
            rank.is_told = True  # below
            rank.kill()
        else:
            what = f"the comm process (pid {comm}) of {what}"
            kill_comm(comm, rank.pid)
        self._changes.reporter.caused(f"{what} hung", "hung", began_at, is_root=True)
        self._output.write_line(
            f"elasticgang: killed {what}: no progress for {stalled_s:.1f} s while other ranks were blocked on it"
        )

    async def report(self, standstill: Standstill) -> None:
        """HANG-5: write each rank's stack to stderr and to the events. No rank is killed."""
        self.is_reporting = True
        stalled = [rank for rank in self._ranks.of(standstill.members) if rank.status is None]
        try:
            found = await asyncio.gather(*map(_stack_of, stalled))
        finally:
            self.is_reporting = False
        ranks = [(rank.local_rank, rank.pid, stack) for rank, stack in zip(stalled, found, strict=True)]
        stalled_s = standstill.stalled_ms / 1000
        self._events.write(
            "standstill",
            stalled_s=stalled_s,
            ranks=[{"local_rank": local_rank, "pid": pid, "stack": stack} for local_rank, pid, stack in ranks],
        )
        self._output.write_line(
            f"elasticgang: warning: no rank of this host has made progress for {stalled_s:.1f} s. No rank waits for "
            'another, so none is killed. Use `manager.paused("...")` around work that takes long. Their stacks, '
            f"innermost frame first:\n{stacks.merge(ranks)}"
        )


async def _stack_of(rank: RankProcess) -> str:
    """The rank's stack, or why it cannot be read: the agent may have no descriptor or thread left for that."""
    try:
        if (source := rank.stack_source()) is None:
            return "it has ended"
        try:
            reading = in_daemon_thread(stacks.read, source)
        except RuntimeError:  # no thread can be started to close it
            source.close()
            raise
        return str(await reading)
    except Exception as exc:
        return f"its stack cannot be read: {exc}"
