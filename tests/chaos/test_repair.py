"""A rank of a replica group dies: its group is made whole or given up, and only those move that must.

Real training over `tp`, `pp` and `sdp`; where a rank dies is decided by the job itself (`sharded_job.py`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.sharded import Reference, Sizes, check, histories, moved, reference_in, run, steps_for
from tests.chaos.test_kills import BACK, at, soon
from tests.support import Job

PAIRS = Sizes(active=4, spares=1, tp=2)  # at first, ranks 0 and 1 are one replica group, 2 and 3 the other

ONE_IN_THE_LAST = [at("votes_received", 0, step=steps_for([{}]) - 1)]

Scenario = tuple[Sizes, list[dict[str, Any]]]

SCENARIOS: dict[str, Scenario] = {
    "six ranks in pairs, without a spare": (
        Sizes(active=6, tp=2),
        [at("forward", 3, without=True), at("votes_received", 0), BACK],
    ),
    "stages, and a spare": (
        Sizes(active=4, spares=1, pp=2),
        [at("forward", 0), at("forward", 3), at("votes_received", 1), BACK],
    ),
    "shards, and a spare": (
        Sizes(active=4, spares=1, sdp=2),
        [at("forward", 3), at("totals_received", 0), at("applied", 1), BACK],
    ),
    "shards by FSDP2, and a spare": (
        Sizes(active=4, spares=1, sdp=2, fsdp=True),
        [at("forward", 3), at("votes_received", 0), at("forward", None), at("applied", None), BACK],
    ),
    "in doubt: one of a pair": (
        PAIRS,
        [
            at("totals_received", 1),
            at("votes_received", 2),
            at("commit_recorded", 3),
            at("torn", 4),
            at("applied", 0),
            at("votes_received", None),
            BACK,
        ],
    ),
    "in doubt: both of a pair, and one of each": (
        PAIRS,
        [
            at("votes_received", 0, [0, 1]),
            at("votes_received", 4),
            at("totals_received", 2, [2, 3]),  # 4 was the spare, and 2 and 3 stay a pair
            BACK,
        ],
    ),
    "in doubt: comm processes": (
        PAIRS,
        [
            at("votes_received", 0, "comm"),
            at("totals_received", 1, "comms"),
            at("votes_received", 3, "comms"),
            at("applied", 2, "comm"),
            BACK,
        ],
    ),
    "while the spare takes the seat": (
        Sizes(active=6, spares=1, tp=2),
        [
            at("body", 3),
            soon("built", None),
            at("body", 0),
            soon("healing", None),
            at("body", None),
            soon("chunk_received", None),
            at("body", None),
            soon("configuring", None),
            at("body", None),
            soon("serving", None),
            BACK,
        ],
    ),
    "in the last step": (PAIRS, ONE_IN_THE_LAST),
    "before the first step": (PAIRS, [soon("forward", 0, [0, 2], step=0), BACK]),
}

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_in(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Job]]]:
    """The jobs of all scenarios that were selected, two at a time: each is idle half of its time."""
    selected = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_a_kill_leaves_no_trace_in_the_result
    ]
    with ThreadPoolExecutor(2) as pool:
        directories = {name: tmp_path_factory.mktemp("job") for name in selected}
        yield {name: pool.submit(run, directories[name], *SCENARIOS[name]) for name in selected}
        pool.shutdown(cancel_futures=True)


# SHARDED-1, SHARDED-2
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_leaves_no_trace_in_the_result(name: str, jobs: dict[str, Future[Job]], reference: Reference) -> None:
    check(jobs[name].result(), *SCENARIOS[name], reference)


def test_without_a_spare_a_pair_is_given_up_until_the_next_join_fills_the_hole(
    jobs: dict[str, Future[Job]],
) -> None:
    job = jobs["six ranks in pairs, without a spare"].result()
    counts = [
        (event["active"] + event["learner"], event["spare"]) for event in job.events() if event["event"] == "generation"
    ]
    assert counts[:3] == [(6, 0), (4, 1), (6, 0)]
    (reason, *_) = [event["reason"] for event in job.events() if event["event"] == "spare"]
    assert reason.startswith("4 ranks fill 2 replica groups of 2; it takes the seat of one that is lost")


def test_what_is_left_of_two_pairs_makes_one_and_nobody_heals(tmp_path: Path, reference: Reference) -> None:
    """Ranks 1 and 2 have the model between them, and what they keep is what they held."""
    sizes, faults = Sizes(active=4, tp=2), [at("body", 0, [0, 3], without=True), BACK]
    job = run(tmp_path, sizes, faults)
    check(job, sizes, faults, reference)
    after = [event for event in job.events() if event["event"] == "generation"][1]
    assert (after["active"], after["learner"], after["ranks"]) == (2, 0, [1, 2])


def test_where_no_replica_group_is_whole_the_spares_heal_before_the_next_step(
    tmp_path: Path, reference: Reference
) -> None:
    """The first stage of one dies and the last of the other: nobody has slots until the spares have healed."""
    sizes, faults = Sizes(active=4, spares=2, pp=2), [at("body", 0, [0, 3]), BACK]
    job = run(tmp_path, sizes, faults)
    check(job, sizes, faults, reference)
    after = [event for event in job.events() if event["event"] == "generation"][1]
    assert (after["active"], after["learner"]) == (2, 2)
    assert moved(histories(tmp_path)) == []


def test_who_moves_to_another_part_of_the_model_builds_and_heals_it(tmp_path: Path, reference: Reference) -> None:
    """Of three pairs, two first halves die: one of the second halves that are left takes one's place."""
    sizes, faults = Sizes(active=6, tp=2), [at("body", 0, [0, 2], without=True), BACK]
    check(run(tmp_path, sizes, faults), sizes, faults, reference)
    built = [[line["part"] for line in lines if line["kind"] == "built"] for lines in histories(tmp_path).values()]
    assert [[0, 0, 1], [0, 0, 0]] in built
    assert max(map(len, built)) == 2


def test_when_all_that_hold_a_part_die_the_job_ends_and_says_so(tmp_path: Path) -> None:
    job = run(tmp_path, PAIRS, [at("body", 0, [0, 2], step=3)])
    assert job.process.returncode == 1
    assert "the job's state is lost: no live member holds step 3" in job.stderr


def test_stages_shards_and_pairs_together(tmp_path: Path, reference: Reference) -> None:
    """Two replica groups of eight, and a spare. A few steps: these are 36 processes."""
    steps = 6
    sizes, faults = Sizes(active=16, spares=1, pp=2, sdp=2, tp=2), [at("forward", 5), at("votes_received", 9)]
    job = run(tmp_path, sizes, faults, steps=steps)
    check(job, sizes, faults, reference, steps=steps)
    assert moved(histories(tmp_path)) == []


COMMUNICATES = """
import elasticgang as eg
manager = eg.join(layout=eg.ParallelLayout(tp=2))
def build(seat):
    assert (manager.gangs.tp.rank, manager.gangs.tp.size) == (seat.tp, 2)
    manager.gangs.tp.barrier()
manager.build(build)
next(manager.steps(1))
"""

UNEVEN = """
import torch, elasticgang as eg
manager = eg.join(layout=eg.ParallelLayout(sdp=2))
manager.register_state(model=torch.nn.Linear(1, 1))
for step in manager.steps(1):
    with step:
        eg.GlobalBatch(9, size=6, slot=2).slots(step)
"""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (COMMUNICATES, "InvalidOperationError: The gang tp cannot be used to communicate while the training state is "),
        (UNEVEN, "ValueError: `size` must be a multiple of `slot` x `sdp` (2 x 2)"),
    ],
)
def test_what_would_make_the_others_wait_for_ever_is_refused(tmp_path: Path, script: str, reason: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    with Job(tmp_path, path, ranks=2) as job:
        assert job.wait() == 1
        assert reason in job.stderr
        job.assert_nothing_left()


LARGE = """
import hashlib, os, pathlib, resource, signal, time
import torch, elasticgang as eg
from elasticgang import testing
from elasticgang.member.rank_context import inherited
from elasticgang.state import striped_fetch

manager = eg.join()
model = torch.nn.Linear(2048, 2048)
ddp = eg.DistributedDataParallel(manager, model)
optim = eg.Optimizer(manager, torch.optim.Adam(model.parameters()))
manager.register_state(model=model, optim=optim)
batches = eg.GlobalBatch(64, size=6, slot=2)
inner = striped_fetch.StripedFetch.run
under_way = []
def run(self):
    under_way.append(self)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    state = inner(self)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print("pulled from", len(self.num_from), "reserve", inherited().optimizer_bytes, "faults", faults, flush=True)
    return state
striped_fetch.StripedFetch.run = run
def wait_for_both():  # nobody reads a second chunk before both holders have given one
    limit = time.monotonic() + 60
    while pathlib.Path("fired").exists() and len(under_way[-1].num_from) < 2:
        assert time.monotonic() < limit
        time.sleep(0.002)
testing.fail_at("chunk_received", wait_for_both)
for step in manager.steps(8):
    with step:
        slots = batches.slots(step)
        for slot in slots:
            with ddp.accumulate(last=slot.last):
                ddp(torch.randn(2, 2048)).square().sum().backward()
        fired = pathlib.Path("fired")
        if step.index == 2 and os.environ["LOCAL_RANK"] == "1" and not fired.exists():
            fired.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step.index == 4 and manager.num_members < 3:  # nobody finishes before it is back
            while not (manager.join_noticed or manager.poisoned):
                time.sleep(0.002)
        optim.step(weight=slots.num_samples)
print("digest", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
"""


# RESERVE-1, RESERVE-3
def test_a_large_state_is_pulled_from_all_that_hold_it(tmp_path: Path) -> None:
    """Into memory whose pages are there: the other ranks wait."""
    path = tmp_path / "script.py"
    path.write_text(LARGE)
    with Job(tmp_path, path, ranks=3) as job:
        assert job.wait() == 0, job.stderr
    (healed,) = [line for line in job.stdout.splitlines() if "pulled from 2" in line]
    *_, reserved, _, num_faults = healed.split()
    size = 2 * 4 * 2048 * 2049  # Adam's averages
    assert size <= int(reserved) <= size + 4 * 64  # and their numbers of steps, aligned
    assert int(num_faults) < size // mmap.PAGESIZE // 4
    digests = [line.rpartition(" ")[2] for line in job.stdout.splitlines() if " digest " in line]
    assert len(digests) == 3
    assert len(set(digests)) == 1
