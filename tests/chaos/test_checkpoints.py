"""Jobs that are killed whole go on at their newest checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from elasticgang.checkpoint import listing
from elasticgang.checkpoint.locations import storage_at
from elasticgang.train.data import GlobalBatch
from elasticgang.watch.summary import Summary
from tests.chaos.several import Coordinator
from tests.exhaustive import exhaustive
from tests.support import REPOSITORY, Job, kill, wait_until

pytestmark = pytest.mark.timeout(400)  # several jobs, one after another

SCRIPT = REPOSITORY / "tests" / "chaos" / "resumed_job.py"
STEPS = 60
EVERY = 10


@contextlib.contextmanager
def job(
    directory: Path,
    name: str,
    ranks: int,
    *,
    steps: int = STEPS,
    width: str = "64",
    every: str = str(EVERY),
    max_file_bytes: str = "",
    apart: str = "",
    options: Sequence[str] = (),
    die_in_last: str = "",
    location: str = "",
    await_saves: str = "",
    size: str = "8",
    num_samples: str = "37",
    pause: str = "0",
) -> Iterator[Job]:
    here = directory / name
    here.mkdir(exist_ok=True)
    with Job(
        here,
        SCRIPT,
        str(directory),
        str(steps),
        every,
        ranks=ranks,
        options=["--checkpoint-dir", location or str(directory / "checkpoints"), *options],
        env={
            "WIDTH": width,
            "MAX_FILE_BYTES": max_file_bytes,
            "APART": apart,
            "DIE_IN_LAST": die_in_last,
            "AWAIT_SAVES": await_saves,
            "SIZE": size,
            "SAMPLES": num_samples,
            "PAUSE": pause,
        },
    ) as running:
        yield running


@cache
def alone(steps: int, width: str) -> str:
    with TemporaryDirectory() as directory, job(Path(directory), "alone", 1, steps=steps, width=width) as running:
        assert running.wait() == 0, running.stderr
        return (Path(directory) / "done-0").read_text()


def results(directory: Path) -> set[str]:
    return {path.read_text() for path in directory.glob("done-*")}


def newest(directory: Path) -> int:
    """The step of the newest complete checkpoint, every digest of which is right; 0 for none."""
    with contextlib.suppress(FileNotFoundError, StopIteration):
        return next(listing.scan(storage_at(directory / "checkpoints"))).attempt.step
    return 0


def summary_of(events: Iterable[dict[str, Any]]) -> Summary:
    found = Summary()
    for event in events:
        found.add(event)
    return found


def hold_in(directory: Path, step: int) -> None:
    (directory / "hold.new").write_text(str(step))
    (directory / "hold.new").rename(directory / "hold")


def kill_whole(running: Job) -> None:
    """Every process of the job at once."""
    for process in running.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not running.processes(), "the end of all processes")


@pytest.mark.parametrize("width", ["64"])
def test_a_job_that_was_killed_whole_goes_on_at_its_checkpoint_with_other_ranks(tmp_path: Path, width: str) -> None:
    """Exactly once: what is left is what a run alone leaves, and the registered object has each step once."""
    (tmp_path / "hold").write_text("15")
    with job(tmp_path, "first", 3, width=width) as running:
        wait_until(lambda: newest(tmp_path) == EVERY, "a checkpoint")
        kill_whole(running)
    assert results(tmp_path) == set()
    saved = newest(tmp_path)
    assert saved == EVERY
    (tmp_path / "hold").write_text("35")
    before = {path.name for path in tmp_path.glob("steps-*")}
    with job(tmp_path, "second", 2, width=width) as running:
        wait_until(lambda: newest(tmp_path) > saved, "a further checkpoint")
        kill(running.process.pid)  # the agent: nothing that it started outlives it
        wait_until(lambda: not running.processes(), "the end of all processes")
    resumed = {path.name: path.read_text().split() for path in tmp_path.glob("steps-*") if path.name not in before}
    assert {int(steps[0]) for steps in resumed.values()} == {saved}
    (tmp_path / "hold").unlink()
    with job(tmp_path, "third", 4, width=width) as running:
        assert running.wait() == 0, running.stderr
        assert "loaded the checkpoint" in running.stderr
        assert "; continues at the checkpoint of step " in running.stderr
    assert len(list(tmp_path.glob("done-*"))) == 4
    assert results(tmp_path) == {alone(STEPS, width)}
    assert newest(tmp_path) == STEPS
    complete, incomplete = listing.names(storage_at(tmp_path / "checkpoints"))
    assert (len(complete), incomplete) == (2, [])  # `keep`
    with job(tmp_path, "fourth", 1, width=width) as running:  # there is nothing left to do
        assert running.wait() == 0, running.stderr
    assert results(tmp_path) == {alone(STEPS, width)}


# MANAGER-22, LIFE-5, REPEAT-1, STOP-ALL
@pytest.mark.parametrize(
    "numbers",
    [(), pytest.param((signal.SIGTERM,), marks=exhaustive), (signal.SIGTERM, signal.SIGHUP)],
    ids=["", "all", "hup"],
)
def test_sigterm_loses_no_step_of_a_job_with_checkpoints(tmp_path: Path, numbers: tuple[signal.Signals, ...]) -> None:
    """As that of a batch system whose time limit is reached. The job goes on with other ranks. `numbers`: what every
    process of the job gets, as from a service manager or a machine that shuts down."""
    steps, every = 100, 20
    (tmp_path / "hold").write_text(str(every + 5))
    options = ["--grace-period", "60"]
    # The pauses let the ranks leave before the job ends.
    with job(tmp_path, "first", 3, steps=steps, every=str(every), options=options, pause="0.05") as running:
        wait_until(lambda: newest(tmp_path) == every, "a checkpoint")
        for number in numbers:
            for process in running.processes():
                with contextlib.suppress(psutil.NoSuchProcess):  # some may have ended by now
                    process.send_signal(number)
        running.process.send_signal(signal.SIGTERM)
        running.expect("signal")
        (tmp_path / "hold").unlink()
        assert running.wait() == 128 + signal.SIGTERM, running.stderr
    assert results(tmp_path) == set()
    committed = max(int(step) for path in tmp_path.glob("steps-*") for step in path.read_text().split()) + 1
    assert newest(tmp_path) == committed
    assert committed > every
    with job(tmp_path, "second", 2, steps=steps, every=str(every)) as running:
        assert running.wait() == 0, running.stderr
        assert f"; continues at the checkpoint of step {committed}; " in running.stderr
    assert results(tmp_path) == {alone(steps, "64")}


# MANAGER-22
def test_a_death_during_the_save_before_the_last_ranks_leave_loses_no_step(tmp_path: Path) -> None:
    """The others take another step without the rank, and save that."""
    steps, every = 1000, 50
    (tmp_path / "hold").write_text(str(every + 5))
    options = ["--grace-period", "60"]
    with job(tmp_path, "job", 3, steps=steps, every=str(every), options=options, die_in_last="1") as running:
        wait_until(lambda: newest(tmp_path) == every, "a checkpoint")
        running.process.send_signal(signal.SIGTERM)
        running.expect("signal")
        (tmp_path / "hold").unlink()
        assert running.wait() == 128 + signal.SIGTERM, running.stderr
    assert (tmp_path / "died").exists()
    committed = max(int(step) for path in tmp_path.glob("steps-*") for step in path.read_text().split()) + 1
    assert newest(tmp_path) == committed


# SERVE-LEAVE
def test_a_coordinator_that_gets_sigterm_with_its_agents_ends_after_them(tmp_path: Path) -> None:
    """As where a whole service is stopped. Without it, the last holders of the state would wait for the spares."""
    steps, every = 1000, 50
    (tmp_path / "hold").write_text(str(every + 5))
    (tmp_path / "coordinator").mkdir()
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(Coordinator(tmp_path / "coordinator"))
        options = ["--coordinator", coordinator.address, "--nnodes", "2:2", "--job-id", "job"]
        options += ["--spares", "1", "--grace-period", "60"]
        agents = [
            stack.enter_context(job(tmp_path, name, 2, steps=steps, every=str(every), options=options))
            for name in ("one", "other")
        ]
        wait_until(lambda: newest(tmp_path) == every, "a checkpoint")
        coordinator.process.send_signal(signal.SIGTERM)
        for process in [each for agent in agents for each in agent.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess):  # the first ones may have left by now
                process.send_signal(signal.SIGTERM)
        for agent in agents:
            agent.expect("signal")
        (tmp_path / "hold").unlink()
        assert [agent.wait() for agent in agents] == [128 + signal.SIGTERM] * 2, agents[0].stderr + agents[1].stderr
        assert coordinator.wait() == 0, coordinator.stderr
    committed = max(int(step) for path in tmp_path.glob("steps-*") for step in path.read_text().split()) + 1
    assert newest(tmp_path) == committed
    assert committed > every


def test_a_job_that_was_killed_whole_goes_on_at_the_checkpoint_of_a_url_with_other_ranks(tmp_path: Path) -> None:
    location = f"file://{tmp_path}/checkpoints"
    (tmp_path / "hold").write_text("15")
    with job(tmp_path, "first", 2, location=location) as running:
        wait_until(lambda: newest(tmp_path) == EVERY, "a checkpoint")
        kill_whole(running)
    assert results(tmp_path) == set()
    (tmp_path / "hold").unlink()
    with job(tmp_path, "second", 3, location=location) as running:
        assert running.wait() == 0, running.stderr
        assert f"loaded the checkpoint {location}/step-{EVERY:012d}-" in running.stderr
    assert len(list(tmp_path.glob("done-*"))) == 3
    assert results(tmp_path) == {alone(STEPS, "64")}
    complete, incomplete = listing.names(storage_at(location))
    assert (len(complete), incomplete) == (2, [])  # `keep`
    assert newest(tmp_path) == STEPS


# NEXT-8
def test_the_record_the_events_and_the_status_name_the_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "hold").write_text("15")
    with job(tmp_path, "job", 2) as running:
        saved = running.expect("saved", step=EVERY)
        [found] = listing.scan(storage_at(tmp_path / "checkpoints"))
        assert found.manifest is not None
        assert (saved["path"], saved["digest"]) == (found.path, found.manifest.digest)
        assert saved["bytes"] == found.manifest.num_bytes > 0
        kill(running.rank_pid(1))
        assert running.expect("generation", generation=2)["saved"] == EVERY
        status = summary_of(running.events()).report({}, time.monotonic(), is_alive=True)
        assert status["checkpoint"]["step"] == EVERY
        assert status["checkpoint"]["path"] == found.path
        (tmp_path / "hold").unlink()
        assert running.wait() == 0, running.stderr
        assert [event["step"] for event in running.events() if event["event"] == "saved"][-1] == STEPS
    assert results(tmp_path) == {alone(STEPS, "64")}


def test_all_ranks_at_once_go_back_to_the_checkpoint(tmp_path: Path) -> None:
    """The agent lives: no rank holds the state any more, and the job goes on without a word of an operator."""
    (tmp_path / "hold").write_text("15")
    with job(tmp_path, "job", 2) as running:
        wait_until(lambda: newest(tmp_path) == EVERY, "a checkpoint")
        pids = [running.rank_pid(rank) for rank in range(2)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            kill(pid)
        running.expect("spawned", count=4)
        (tmp_path / "hold").unlink()
        assert running.wait() == 0, running.stderr
        assert "loaded the checkpoint" in running.stderr
    assert results(tmp_path) == {alone(STEPS, "64")}


def test_a_corrupt_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    with job(tmp_path, "first", 2, steps=2 * EVERY) as running:
        assert running.wait() == 0, running.stderr
    found = next(listing.scan(storage_at(tmp_path / "checkpoints")))
    assert found.attempt.step == 2 * EVERY
    (file,) = Path(found.path).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for path in tmp_path.glob("done-*"):
        path.unlink()
    with job(tmp_path, "second", 3) as running:
        assert running.wait() == 0, running.stderr
        assert f"cannot load the checkpoint {found.path}" in running.stderr
        assert f"step-{EVERY:012d}" in running.stderr
        assert f"; tries the checkpoint of step {2 * EVERY}" in running.stderr
        assert f" could not load the checkpoint of step {2 * EVERY}): " in running.stderr
        assert f"; continues at the checkpoint of step {EVERY};" in running.stderr
    assert results(tmp_path) == {alone(STEPS, "64")}


def test_training_goes_on_while_no_save_fits_on_the_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    with job(tmp_path, "first", 2, steps=EVERY) as running:
        assert running.wait() == 0, running.stderr
    with job(tmp_path, "second", 2, max_file_bytes="65536") as running:
        assert running.wait() == 1, running.stderr
        final = f"the job has finished, but its state after the last step, {STEPS}, is not saved"
        assert running.stderr.count(f"elasticgang: error: {final}") == 1
        assert running.expect("unsaved")["step"] == running.expect("exiting", code=1)["step"] == STEPS
        assert f"step {2 * EVERY} is not saved: " in running.stderr
        assert running.stderr.count(" is not saved") < STEPS // EVERY  # UNSAVED-1; one is the agent's own
        assert "File too large" in running.stderr
    assert newest(tmp_path) == EVERY
    assert results(tmp_path) == {alone(STEPS, "64")}


def test_a_job_with_a_checkpoint_of_another_model_ends_with_the_first_difference(tmp_path: Path) -> None:
    with job(tmp_path, "first", 1, steps=EVERY) as running:
        assert running.wait() == 0, running.stderr
    with job(tmp_path, "second", 1, width="65") as running:
        assert running.wait() == 1
        assert "padding is [64, 256] in it, but [65, 256] in this job" in running.stderr
    assert newest(tmp_path) == EVERY


@pytest.mark.parametrize("size", [4, 16])
def test_a_job_that_goes_on_with_another_size_takes_the_samples_that_follow(tmp_path: Path, size: int) -> None:
    with job(tmp_path, "first", 1, steps=EVERY) as running:
        assert running.wait() == 0, running.stderr
    with job(tmp_path, "second", 2, steps=EVERY + 48 // size, size=str(size)) as running:
        assert running.wait() == 0, running.stderr
    taken = Counter(int(line) for path in tmp_path.glob("samples-*") for line in path.read_text().split())
    alike = GlobalBatch(37, size=8, slot=2, seed=5)
    assert taken == Counter(int(sample) for step in range(EVERY + 48 // 8) for sample in alike.samples(step))


def test_a_job_does_not_go_on_with_another_number_of_samples(tmp_path: Path) -> None:
    with job(tmp_path, "first", 1, steps=EVERY) as running:
        assert running.wait() == 0, running.stderr
    with job(tmp_path, "second", 1, num_samples="36") as running:
        assert running.wait() == 1
        assert "`num_samples` must be 37, as in the job that this one continues, but is 36 instead" in running.stderr
    assert newest(tmp_path) == EVERY


def test_a_job_over_two_directories_ends_with_both_digests(tmp_path: Path) -> None:
    """Two jobs have saved the same step of the same generation, each in a directory of its own."""
    own, found = tmp_path / "checkpoints-0", []
    for directory in (tmp_path / "checkpoints-1", own):
        with job(tmp_path, "first", 1, steps=EVERY, apart="1") as running:
            assert running.wait() == 0, running.stderr
        own.rename(directory)
        found.append(next(listing.scan(storage_at(directory))))
    one, other = found
    assert one.attempt == other.attempt
    assert one.manifest is not None
    assert other.manifest is not None
    hold_in(tmp_path, EVERY)  # or the other rank may train to the end before the process of the first has ended
    with job(tmp_path, "second", 2, apart="1") as running:
        assert running.wait() == 1
        text = running.stderr
    wanted, here = sorted((one, other), key=lambda each: each.manifest.digest if each.manifest else "", reverse=True)
    assert wanted.manifest is not None
    assert here.manifest is not None
    assert f"continues at the checkpoint of step {EVERY} with the manifest digest {wanted.manifest.digest}" in text
    assert f"{here.path} with the manifest digest {here.manifest.digest}" in text
    assert results(tmp_path) == {alone(EVERY, "64")}  # of the two jobs before


def test_saves_by_the_clock_are_complete_whatever_rank_dies(tmp_path: Path) -> None:
    """Each rank has a clock of its own, and what each of them saves belongs to one step."""
    width = "8192"  # large enough for two writers
    hold_in(tmp_path, 20)
    with job(tmp_path, "first", 3, every="0.05s", width=width, await_saves="1") as running:
        wait_until(lambda: newest(tmp_path) > 0, "a checkpoint")
        kill(running.rank_pid(1))
        hold_in(tmp_path, 50)
        wait_until(lambda: newest(tmp_path) > 20, "a checkpoint after the death of a rank")
        kill_whole(running)
    saved = newest(tmp_path)
    assert 0 < saved < STEPS
    (tmp_path / "hold").unlink()
    with job(tmp_path, "second", 2, every="3600s", width=width) as running:
        assert running.wait() == 0, running.stderr
        assert f"loaded the checkpoint {tmp_path / 'checkpoints'}" in running.stderr
    assert newest(tmp_path) == STEPS  # the final state, though it was not due
    assert results(tmp_path) == {alone(STEPS, width)}


@pytest.mark.parametrize("every", ["7", "3600s"])
def test_the_final_state_is_saved_whatever_rank_dies_meanwhile(tmp_path: Path, every: str) -> None:
    with job(tmp_path, "first", 3, every=every, die_in_last="1") as running:
        assert running.wait() == 0, running.stderr
    assert (tmp_path / "died").exists()
    assert newest(tmp_path) == STEPS
    assert results(tmp_path) == {alone(STEPS, "64")}
    with job(tmp_path, "second", 2, every=every) as running:  # there is nothing left to do
        assert running.wait() == 0, running.stderr
        assert f"loaded the checkpoint {tmp_path / 'checkpoints' / f'step-{STEPS:012d}'}" in running.stderr
    assert results(tmp_path) == {alone(STEPS, "64")}
