"""A run's figures: as JSON, and as lines for people.

Pure, as `run_audit.py` is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.demo_job.kills import DueKill
from scripts.demo_job.run_audit import (
    Audit,
    CommittedRun,
    Difference,
    Kill,
    Outcome,
    Recovery,
    Rejoin,
    audit,
    faults,
    final_digests,
    largest_difference,
    percentile,
    recoveries,
    rejoins,
    whole_digest,
)
from scripts.demo_job.run_log import Part, RunLog, Sizes

# How far the loss of a step may be from that of the undisturbed run, which adds up the same terms in another order.
#
# Measured on CPU (float32) with 1, 2, 3 and 4 ranks, undisturbed, over 300 steps with the seeds 0 and 1: any two of
# these runs differ by 2.6e-7 at most. That is the rounding of the loss itself, and it does not grow: over 1000 steps of
# one process that adds the slots in two different orders it is 2.6e-7 too. (At twice the learning rate it grows with
# the steps: with samples of 64 bytes to 2e-6 by step 300 and 4e-3 by step 1500.) One sample of one step left out makes
# a difference of 0.27 or more in that step and of up to 2e-3 to 6e-3 in later ones: the limit is far from both.
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Asked:
    """What the run was to be. `kill_every_s`: None for a run without kills. `reproducible`: it must end in the bits of
    the reference. `parts`: those of the layout, each a (pp, sdp, tp); one () without a layout. `hosts`: how often the
    second host was lost."""

    ranks: int
    steps: int
    seed: int
    kill_every_s: float | None
    reproducible: bool = False
    layout: str = ""
    parts: Sequence[Part] = ((),)
    hosts: int = 0


@dataclass(frozen=True)
class Run:
    """A run that is over. `due`: the kills that were asked for. `carried_out`: each as drawn and as done; `kills`: of
    these, the ones that happened. `reference`: the undisturbed run, if there was one."""

    asked: Asked
    run_log: RunLog
    failure: str | None
    due: Sequence[DueKill]
    carried_out: Sequence[tuple[DueKill, Kill]]
    kills: Sequence[Kill]
    expected: Sequence[Sequence[int]]
    reference: RunLog | None


class Report:
    """Everything there is to say about a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.committed_run = CommittedRun(run.run_log)
        self.curve = self.committed_run.curve
        self.recoveries: list[Recovery] = recoveries(run.run_log, self.committed_run, run.kills, run.asked.ranks)
        self.rejoins: list[Rejoin] = rejoins(run.run_log, self.committed_run)
        self.layouts = self.committed_run.layouts
        self.reference = None if run.reference is None else CommittedRun(run.reference).curve
        self.difference: Difference | None = None
        if self.reference is not None:
            self.difference = largest_difference(self.curve, self.reference)
        self.reference_digest: str | None = None
        if run.asked.reproducible and run.reference is not None:
            self.reference_digest = next((finished.digest for finished in run.reference.finished), "unknown")
        reached = max(self.curve, default=-1) + 1  # of a job that failed, what it committed is still audited
        expected = run.expected[:reached] if run.failure else run.expected
        self.audit: Audit = audit(self.committed_run, expected, {part[:1] + part[2:] for part in run.asked.parts})
        digests = final_digests(run.run_log, run.asked.parts)
        self.digest = whole_digest(digests) if run.asked.reproducible else None
        self.faults = faults(
            Outcome(
                failure=run.failure,
                steps_asked=run.asked.steps,
                steps=len(self.curve),
                audit=self.audit,
                torn=self.committed_run.torn,
                digests=digests,
                difference=self.difference,
                tolerance=LOSS_TOLERANCE,
                kills_asked=len(run.due),
                kills=len(run.kills),
                reference_digest=self.reference_digest,
                hosts_asked=run.asked.hosts,
                fallbacks=sum(sizes != self.layouts[0] for sizes in self.layouts),
            )
        )

    @property
    def seconds(self) -> float:
        """From the start of the ranks to the last committed step."""
        if self.run.run_log.started_at is None:
            return 0.0
        return max(self.committed_run.committed_at.values(), default=0.0) - self.run.run_log.started_at

    def summary(self) -> dict[str, Any]:
        asked, reference = self.run.asked, self.reference
        recovery_ms = _measured(recovery.recovery_ms for recovery in self.recoveries)
        rejoin_ms = _measured(recovery.rejoin_ms for recovery in self.recoveries)
        return {
            "passed": not self.faults,
            "faults": self.faults,
            "steps": len(self.curve),
            "ranks": asked.ranks,
            "layout": asked.layout,
            "layouts": [",".join(f"{axis}={size}" for axis, size in _named(sizes)) for sizes in self.layouts],
            "hosts_lost": asked.hosts,
            "kills": len(self.run.kills),
            "rejoins": len(self.rejoins),
            "generations": self.run.run_log.num_generations,
            "dropped_steps": len(self.committed_run.dropped),
            "lost_samples": self.audit.lost,
            "duplicate_samples": self.audit.duplicate,
            "final_loss": _last(self.curve),
            "reference_final_loss": None if reference is None else _last(reference),
            "recovery_ms": {name: _rounded(recovery_ms, percent) for name, percent in _PERCENTS.items()},
            "rejoin_ms": {name: _rounded(rejoin_ms, _PERCENTS[name]) for name in ("p50", "max")},
            "tokens_per_s": round(self.committed_run.num_tokens / self.seconds, 1) if self.seconds > 0 else None,
            "seconds": round(self.seconds, 3),
            "steps_asked": asked.steps,
            "kills_asked": len(self.run.due),
            "parameters": sorted({finished.digest for finished in self.run.run_log.finished}),
            "whole_parameters": self.digest,
            "reference_parameters": self.reference_digest,
            "not_measured": {
                "recovery_ms": len(self.recoveries) - len(recovery_ms),
                "rejoin_ms": len(self.recoveries) - len(rejoin_ms),
            },
            "loss_difference": None if self.difference is None else self._difference(self.difference),
            "kill_schedule": {
                "seed": asked.seed,
                "every_s": asked.kill_every_s,
                "drawn": [{"after_s": round(due.after_s, 3), "rank": due.local_rank} for due in self.run.due],
                "carried_out": [self._carried_out(due, kill) for due, kill in self.run.carried_out],
            },
        }

    def lines(self) -> Iterator[str]:
        """The summary, for people."""
        summary = self.summary()
        yield (
            f"{summary['steps']} steps with {summary['ranks']} ranks in {self.seconds:.1f} s "
            f"({summary['tokens_per_s'] or 0:.0f} tokens/s), loss {_first(self.curve):.3f} -> {_last(self.curve):.3f}"
        )
        yield (
            f"  kills        {summary['kills']} of {summary['kills_asked']} asked for, {summary['rejoins']} ranks came "
            f"back, {summary['generations']} generations, {summary['dropped_steps']} tries dropped"
        )
        if summary["hosts_lost"]:
            layouts = " -> ".join(summary["layouts"])
            yield f"  layouts      {layouts}; the second host was lost {summary['hosts_lost']} times"
        num_samples = sum(len(samples) for samples in self.run.expected)
        yield f"  samples      {num_samples} due, {self.audit.lost} lost, {self.audit.duplicate} seen twice"
        for name, unmeasured in summary["not_measured"].items():
            if self.recoveries:
                figures = ", ".join(f"{key} {_ms(value)}" for key, value in summary[name].items())
                left_out = f" ({unmeasured} not measured: near the end, or not seated yet)" if unmeasured else ""
                yield f"  {name.removesuffix('_ms'):<13}{figures}{left_out}"
        if self.difference is not None:
            yield (
                f"  reference    final loss {summary['reference_final_loss']:.3f}, largest difference in a step "
                f"{self.difference.size:.1e} (tolerance {LOSS_TOLERANCE:.0e})"
            )
        if self.reference_digest is not None:
            own, other = (digest or "unknown" for digest in (self.digest, self.reference_digest))
            told = f"equal ({own[:16]}...)" if own == other else f"{own[:16]}... and {other[:16]}..., NOT equal"
            yield f"  bits         digests of the final parameters and of one undisturbed rank's: {told}"
        if self.run.asked.kill_every_s is not None:
            yield f"  schedule     drawn from seed {self.run.asked.seed}, in seconds after the start of the ranks:"
            for kill in summary["kill_schedule"]["carried_out"]:
                drawn = kill["drawn"]
                yield (
                    f"    {drawn['after_s']:7.2f} rank {drawn['rank']}  done {kill['after_s']:7.2f} rank {kill['rank']}"
                    f"  at step {kill['step']}: recovered in {_ms(kill['recovery_ms'])}, "
                    f"back at full strength in {_ms(kill['rejoin_ms'])}"
                )
        for fault in self.faults:
            yield f"  FAULT        {fault}"

    def _difference(self, difference: Difference) -> dict[str, Any]:
        size = difference.size if math.isfinite(difference.size) else None
        return {"largest": size, "step": difference.step, "tolerance": LOSS_TOLERANCE}

    def _carried_out(self, due: DueKill, kill: Kill) -> dict[str, Any]:
        found = next((recovery for recovery in self.recoveries if recovery.kill == kill), None)
        return {
            "after_s": round(kill.t - (self.run.run_log.started_at or 0.0), 3),
            "rank": kill.local_rank,
            "pid": kill.pid,
            "step": kill.step,
            "drawn": {"after_s": round(due.after_s, 3), "rank": due.local_rank},
            "happened": found is not None,
            "recovery_ms": None if found is None or found.recovery_ms is None else round(found.recovery_ms, 1),
            "rejoin_ms": None if found is None or found.rejoin_ms is None else round(found.rejoin_ms, 1),
        }


def _named(sizes: Sizes) -> list[tuple[str, int]]:
    return [(axis, size) for axis, size in zip(("pp", "sdp", "tp"), sizes, strict=True) if size > 1] or [("sdp", 1)]


_PERCENTS = {"p50": 50.0, "p99": 99.0, "max": 100.0}


def _measured(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _rounded(values: Sequence[float], percent: float) -> float | None:
    value = percentile(values, percent)
    return None if value is None else round(value, 1)


def _first(curve: Mapping[int, float]) -> float:
    return curve[min(curve)] if curve else math.nan


def _last(curve: Mapping[int, float]) -> float:
    return curve[max(curve)] if curve else math.nan


def _ms(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f} ms"
