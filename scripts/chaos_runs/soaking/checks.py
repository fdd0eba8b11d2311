"""Whether a soaked job kept its promises, from what its members and agents wrote.

Pure: no clock, file or torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.demo_job.run_audit import CommittedRun, audit, final_digests, whole_digest
from scripts.demo_job.run_log import RunLog

CLOSE_STEPS = 1000
CLOSE = 1e-5  # see report.py: what another order of summation explains, for that many steps
WINDOW = 100
WINDOW_CLOSE = 0.01


def failed_checks(
    run_log: RunLog,
    generations: Iterable[Mapping[str, Any]],
    changes: Iterable[Mapping[str, Any]],
    expected: Sequence[Iterable[int]],
    reference: Mapping[int, float],
    reference_digest: str | None = None,
) -> list[str]:
    """Every promise that was broken, in sentences. `generations`, `changes`: the events of those names of all agents,
    each agent's in its order; `expected`: the samples of each step; `reference`: the undisturbed run's losses.
    `reference_digest`: of its final parameters, if the job must end in the same bits."""
    committed_run = CommittedRun(run_log)
    found = [*_chain(generations, changes)]
    if committed_run.torn:
        found.append(f"RULE-4: steps {committed_run.torn[:5]} were committed in two different attempts")
    missing = set(range(len(expected))) - set(committed_run.attempts)
    if missing:
        found.append(f"RULE-4: {len(missing)} steps were never committed, the first is {min(missing)}")
    seen = audit(committed_run, expected)
    if seen.lost or seen.duplicate:
        found.append(f"RULE-5: {seen.lost} samples were lost and {seen.duplicate} seen twice")
    return found + _ends(run_log, reference_digest) + _apart(committed_run.curve, reference)


def _ends(run_log: RunLog, reference_digest: str | None) -> list[str]:
    found = []
    by_part = final_digests(run_log)
    for part, digests in by_part.items():
        whose = f" of the part {part}" if part else ""
        if not digests:
            found.append(f"no member{whose} finished")
        elif len(set(digests)) > 1:
            found.append(f"the members{whose} ended with {len(set(digests))} different sets of parameters")
    if reference_digest is not None and whole_digest(by_part) not in (None, reference_digest):
        found.append("the members ended with other bits than one undisturbed rank")
    return found


def _chain(generations: Iterable[Mapping[str, Any]], changes: Iterable[Mapping[str, Any]]) -> list[str]:
    """RULE-2: one record to a generation, whoever tells of it, each of which names the one before."""
    found = []
    digests: dict[int, set[str]] = defaultdict(set)
    for line in generations:
        digests[line["generation"]].add(line["digest"])
    found += [
        f"RULE-2: generation {number} has {len(names)} records" for number, names in digests.items() if len(names) > 1
    ]
    by_digest = {name: number for number, names in digests.items() for name in names}
    for change in changes:
        parent = by_digest.get(change["parent"])
        if change["parent"] and parent is not None and parent + 1 != change["generation"]:
            found.append(f"RULE-2: generation {change['generation']} builds on generation {parent}")
    return found


def _apart(curve: Mapping[int, float], reference: Mapping[int, float]) -> list[str]:
    if not reference:
        return []
    found = []
    early = [step for step in sorted(reference) if step < CLOSE_STEPS]
    worst = max(early, key=lambda step: _difference(curve, reference, step))
    if not _difference(curve, reference, worst) <= CLOSE:
        found.append(
            f"the loss of step {worst} is {_difference(curve, reference, worst):.2g} from the undisturbed run's"
        )
    for start in range(CLOSE_STEPS, len(reference) - WINDOW + 1, WINDOW):
        steps = range(start, start + WINDOW)
        mine = math.fsum(curve.get(step, math.nan) for step in steps) / WINDOW
        theirs = math.fsum(reference[step] for step in steps) / WINDOW
        if not abs(mine - theirs) <= WINDOW_CLOSE * theirs:
            found.append(f"the mean loss from step {start} on is {mine:.4f}, the undisturbed run's {theirs:.4f}")
    return found


def _difference(curve: Mapping[int, float], reference: Mapping[int, float], step: int) -> float:
    difference = abs(curve.get(step, math.nan) - reference.get(step, math.nan))
    return difference if math.isfinite(difference) else math.inf
