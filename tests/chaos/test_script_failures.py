"""`elasticgang run` when the script raises, exits or never joins."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.training_scripts import script, training
from tests.support import Job, kill, wait_until

# -- how it fails


# RANK-2
def test_an_exception_on_every_rank_is_shown_once_and_whole(tmp_path: Path) -> None:
    path = training(tmp_path, body="deep(20)", setup="def deep(n): return deep(n - 1) if n else 1 / 0")
    with Job(tmp_path, path, ranks=3) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("\nZeroDivisionError: division by zero\n") == 1
        assert job.stderr.count("Traceback (most recent call last)") == 1
        assert f'File "{path}", line' in job.stderr
        assert "runpy" not in job.stderr
        reason = r"elasticgang: error: rank \d exited with code 1 before its first committed step$"
        assert re.search(reason, job.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def f(:", "SyntaxError: "),
        (
            """\
            class Mute(RuntimeError):
                def __str__(self):
                    raise ValueError("no text")
            raise Mute
            """,
            "Mute: <",  # Python 3.10 has other words than later ones
        ),
    ],
)
def test_the_traceback_of_a_script_that_does_not_begin_is_its_own(tmp_path: Path, text: str, error: str) -> None:
    path = script(tmp_path, text)
    with Job(tmp_path, path, ranks=1) as job:
        assert job.wait() == 1
        first, *lines, last = job.stderr.splitlines()
    assert first == "elasticgang: rank 0 failed:"
    assert last == "elasticgang: error: rank 0 exited with code 1 before its first committed step"
    assert {line for line in lines if line.startswith('  File "')} <= {
        f'  File "{path}", line {number}{where}' for number in (1, 4) for where in ("", ", in <module>")
    }
    assert any(line.startswith(error) for line in lines), job.stderr


def test_an_error_with_a_long_text_is_shown_with_its_place(tmp_path: Path) -> None:
    path = script(tmp_path, 'raise ValueError("first" + "x" * 10**6 + "last")')
    with Job(tmp_path, path, ranks=1) as job:
        assert job.wait() == 1
        assert f'File "{path}", line 1, in <module>\n' in job.stderr
        assert "\nValueError: firstxxx" in job.stderr
        assert re.search(r"\n\[\d+ characters are left out\]\nx+last\n", job.stderr)
        assert len(job.stderr) < 10**5


def test_a_script_may_take_its_output_away(tmp_path: Path) -> None:
    """As under an interpreter alone."""
    path = training(tmp_path, after="sys.stdout = sys.stderr = None")
    with Job(tmp_path, path, ranks=1) as job:
        assert job.wait() == 0, job.stderr


def test_nothing_is_told_after_why_the_job_has_failed(tmp_path: Path) -> None:
    body = """
                if rank == 1:
                    raise ValueError("no")
    """
    with Job(tmp_path, training(tmp_path, body=body), ranks=2) as job:
        assert job.wait() == 1
    own = [line for line in job.stderr.splitlines() if line.startswith("elasticgang: ")]
    assert any(line.startswith("elasticgang: generation 1") for line in own)
    assert own[-1].startswith("elasticgang: error: ")
    told = [event["event"] for event in job.events() if event["event"] in ("generation_change", "failed")]
    assert told[-1] == "failed"


# MANAGER-19
@pytest.mark.parametrize("first", [0, 1])
def test_a_script_that_goes_on_after_an_exception_costs_one_change_of_generation(tmp_path: Path, first: int) -> None:
    """The other rank waits for no time-out, and what forward has changed is put back. Of the two, `first` requests the
    next generation first: the cause is the same."""
    path = script(
        tmp_path,
        f"""\
        import os, pathlib
        import torch
        from torch import nn
        import elasticgang as eg
        from elasticgang import testing
        from tests.support import wait_until

        here, rank = pathlib.Path({str(tmp_path)!r}), int(os.environ["LOCAL_RANK"])
        manager = eg.join()
        norm = nn.BatchNorm1d(2)
        model = eg.DistributedDataParallel(manager, nn.Sequential(norm, nn.Linear(2, 1)))
        optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        batches, data = eg.GlobalBatch(16, size=4, slot=2), torch.ones(16, 2)
        manager.register_state(model=model, optim=optim)
        tries = []
        for step in manager.steps(5):
            if step.index == 3 and rank == {first}:
                testing.fail_at("requested", (here / "requested").touch)
            elif step.index == 3:
                testing.fail_at("requesting", lambda: wait_until((here / "requested").exists, "the other rank"))
            try:
                with step:
                    tries.append((step.index, int(norm.num_batches_tracked)))
                    slots = batches.slots(step)
                    for slot in slots:
                        with model.accumulate(last=slot.last):
                            model(data[slot.index]).sum().backward()
                    if rank == 1 and [index for index, _ in tries].count(3) == 1 and step.index == 3:
                        raise ValueError("caught")
                    optim.step(weight=slots.num_samples)
            except ValueError:
                continue
        (here / f"tries-{{rank}}").write_text(str([before for index, before in tries if index == 3]))
        """,
    )
    with Job(tmp_path, path, ranks=2, options=["--collective-timeout=900"]) as job:
        assert job.wait() == 0
        changes = [event["cause"] for event in job.events() if event["event"] == "generation_change"]
        assert changes == ["the job starts", "rank 1 left a step by an exception, and goes on"]
    for rank in range(2):
        first, second = json.loads((tmp_path / f"tries-{rank}").read_text())
        assert first == second


def test_an_exception_before_joining_is_shown_too(tmp_path: Path) -> None:
    with Job(tmp_path, script(tmp_path, "raise ValueError('before')")) as job:
        assert job.wait() == 1
        assert job.stderr.count("\nValueError: before\n") == 1


# AGENT-10
def test_a_rank_that_is_killed_after_its_last_step_fails_the_job_once_the_others_have_ended(tmp_path: Path) -> None:
    after = """(here / f"new-{rank}").write_text(str(os.getpid()))
        os.replace(here / f"new-{rank}", here / f"pid-{rank}")
        while rank == 1 and not (here / "pid-0").exists():
            time.sleep(0.005)
        pid = int((here / "pid-0").read_text())
        if rank == 0:
            os.kill(pid, signal.SIGKILL)
        while pathlib.Path(f"/proc/{pid}").exists():  # until its agent has reaped it
            time.sleep(0.005)
        print("saved")"""
    with Job(tmp_path, training(tmp_path, after=after), ranks=2) as job:
        assert job.wait() == 128 + signal.SIGKILL, job.stderr
        job.assert_nothing_left()
        assert job.stdout.count("saved") == 1
        assert "rank 0 was killed by SIGKILL after its last step, before its script had ended" in job.stderr


# AGENT-11
def test_a_rank_that_starts_when_the_others_stop_early_does_not_end_them(tmp_path: Path) -> None:
    """Rank 0 does what follows the loop once rank 1 has found nobody who holds the state."""
    setup = """if rank == 1 and (here / "killed").exists():
            (here / "back").touch()
            while not (here / "left").exists():
                time.sleep(0.005)
            pids = here / "pid"
            pids.with_suffix(".new").write_text(str(os.getpid()))
            os.replace(pids.with_suffix(".new"), pids)"""
    body = """if rank == 1 and step.index == 3:
                    (here / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)"""
    after = """    if step.index >= 4 and (here / "back").exists():
                break
        (here / "left").touch()
        while not (here / "pid").exists():
            time.sleep(0.005)
        pid = int((here / "pid").read_text())
        while pathlib.Path(f"/proc/{pid}").exists():  # until its agent has reaped it
            time.sleep(0.005)
        print("saved")"""
    path = training(tmp_path, steps=10**9, setup=setup, body=body, after=after)
    with Job(tmp_path, path, ranks=2) as job:
        assert job.wait() == 1, job.stderr
        job.assert_nothing_left()
        assert job.stdout.count("saved") == 1, job.stderr
        lost = "the job's state is lost: no live member holds step"
        assert job.stderr.index(lost) < job.stderr.index(f"error: {lost}")


def test_a_negative_exit_code_is_no_signal(tmp_path: Path) -> None:
    """As Python by itself, which exits with its low byte."""
    with Job(tmp_path, script(tmp_path, "import sys; sys.exit(-1)")) as job:
        assert job.wait() == 255
        job.assert_nothing_left()
        assert "exited with code 255 before its first committed step" in job.stderr
        assert "killed by" not in job.stderr


def test_a_rank_whose_script_fails_once_is_restarted_by_default(tmp_path: Path) -> None:
    body = """if rank == 1 and step.index == 5 and not (here / "failed").exists():
                    (here / "failed").touch()
                    raise OSError("of this machine")
                while rank != 1 and step.index == 7 and not (here / "back").exists():
                    time.sleep(0.005)"""
    setup = 'if rank == 1 and (here / "failed").exists(): (here / "back").touch()'
    path = training(tmp_path, steps=9, setup=setup, body=body, after='print("finished", manager.committed_steps)')
    with Job(tmp_path, path, ranks=3) as job:
        assert job.wait() == 0, job.stderr
        assert job.stdout.count("finished 9") >= 2  # and the restarted one, if it came back in time
        assert job.stderr.count("\nOSError: of this machine\n") == 1
        assert "rank 1 exited with code 1 in step 5: restart 1 of 3 within an hour" in job.stderr


def test_each_end_of_a_rank_is_told_in_one_line(tmp_path: Path) -> None:
    """How it ended, and what is done about it. With its pid where nothing else is to be told."""
    setup = """lives = here / "lives"
        if rank == 1:
            lives.open("a").write("x")
            ends = ["os._exit(7)", "os.kill(os.getpid(), signal.SIGSEGV)", "os.kill(os.getpid(), signal.SIGKILL)"]
            end = dict(enumerate(ends, 1)).get(lives.stat().st_size, "")"""
    body = """if rank == 1 and step.index >= 5 * lives.stat().st_size:  # never twice in one step
                    exec(end)
                    (here / "over").touch()
                if (here / "over").exists():
                    manager.leave()"""
    with Job(tmp_path, training(tmp_path, steps=10**9, setup=setup, body=body), ranks=3) as job:
        assert job.wait() == 0, job.stderr
    told = [line for line in job.stderr.splitlines() if line.startswith("elasticgang: rank ")]
    expected = [
        r"exited with code 7 in step \d+: restart 1 of 3 within an hour",
        r"was killed by SIGSEGV in step \d+: restart 2 of 3 within an hour",
        r"\(pid \d+\) was killed by SIGKILL",
    ]
    assert len(told) == 3, told
    for line, words in zip(told, expected, strict=True):
        assert re.fullmatch(f"elasticgang: rank 1 {words}", line), told


def test_an_exit_with_an_error_in_the_loop_is_no_rank_that_has_left(tmp_path: Path) -> None:
    """Also where the exit takes longer than the others need for the next generation."""
    setup = """import atexit
        def wait():
            (here / "exits").touch()
            while not (here / "trained").exists(): time.sleep(0.005)"""
    body = """if rank == 1 and step.index == 5 and not (here / "failed").exists():
                    (here / "failed").touch()
                    atexit.register(wait)
                    sys.exit(3)
                while rank != 1 and step.index >= 5 and not (here / "exits").exists(): time.sleep(0.005)
                if step.index == 8:
                    (here / "trained").touch()
                if rank == 1 and step.index > 5:
                    (here / "back").touch()
                if (here / "back").exists():
                    manager.leave()"""
    with Job(tmp_path, training(tmp_path, steps=10**9, setup=setup, body=body), ranks=3) as job:
        assert job.wait() == 0, job.stderr
    line = "elasticgang: rank 1 exited with code 3 in step 5: restart 1 of 3 within an hour\n"
    assert job.stderr.count(line) == 1
    assert re.search(r"^elasticgang: generation \d+ \(rank 1 exited with code 3\): ", job.stderr, re.MULTILINE)
    assert "left before the last step" not in job.stderr


def test_a_step_in_which_the_script_fails_again_ends_the_job(tmp_path: Path) -> None:
    """On every rank, so that the others fail when they try it without the first. In a step that all begin, after some
    that all have committed: the last holder of the state would end the job otherwise."""
    setup = """
        together = 0

        def fails(index):
            global together
            together = together + 1 if manager.gangs.root.size == 3 else 0
            agreed = here / "step"
            if together == 4 and not agreed.exists():
                (here / f"step-{rank}").write_text(str(index))
                os.replace(here / f"step-{rank}", agreed)
            return agreed.exists() and index == int(agreed.read_text())
        """
    body = 'if fails(step.index): raise ValueError("of the script")'
    with Job(tmp_path, training(tmp_path, steps=10**9, setup=setup, body=body), ranks=3) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("\nValueError: of the script\n") == 1
        assert job.stderr.count("Traceback (most recent call last)") == 1
        step = (tmp_path / "step").read_text()
        reason = rf"elasticgang: error: rank \d exited with code 1 in step {step}, in which rank \d had failed too$"
        assert re.search(reason, job.stderr, re.MULTILINE)


# POSITION-3
def test_ranks_with_different_global_batches_end_the_job(tmp_path: Path) -> None:
    setup = "batches = eg.GlobalBatch(16, size=4, slot=2, seed=rank)"
    with Job(tmp_path, training(tmp_path, steps=10**9, setup=setup), ranks=2) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        error = r"took step \d+ from `GlobalBatch\(16, size=4, seed=(\d)\)`, but this rank from .* seed=(\d)\)`"
        (numbers, *_) = re.findall(error, job.stderr)
        assert sorted(numbers) == ["0", "1"]


# POSITION-3 AGENT-12
def test_a_rank_that_comes_back_with_other_data_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    """As one that counts the files of a dataset that has grown."""
    setup = 'batches = eg.GlobalBatch(20 if (here / "grown").exists() and rank == 1 else 16, size=4, slot=2)'
    body = """if rank == 1 and step.index == 5 and not (here / "grown").exists():
                    (here / "grown").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if (here / "over").exists():
                    manager.leave()"""
    with Job(tmp_path, training(tmp_path, steps=10**9, setup=setup, body=body), ranks=2) as job:
        job.expect_line("elasticgang: rank 1 differs from the others: it is refused, and not restarted")
        (tmp_path / "over").touch()
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
        error = (
            r"MismatchError: .* from `GlobalBatch\(16, size=4, seed=0\)`, but this rank from .*\(20, size=4, seed=0\)`"
        )
        assert re.search(error, job.stderr), job.stderr
        assert job.stderr.count("Traceback (most recent call last)") == 1


# RESTART-3
def test_a_rank_that_fails_whenever_it_comes_back_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    """As one whose script was edited, and cannot be imported any more."""
    body = """if (here / "over").exists():
                    manager.leave()"""
    path = training(tmp_path, steps=10**9, body=body)
    with Job(tmp_path, path, ranks=3) as job:
        job.expect("generation_change")
        path.write_text("def (\n" + path.read_text())
        kill(job.rank_pid(1))
        job.expect_line("elasticgang: rank 1 exited with code 1 before it began a step, again: it is not restarted")
        (tmp_path / "over").touch()
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
        assert job.stderr.count("SyntaxError: ") == 1
        assert sum(event["event"] == "spawned" for event in job.events()) == 5


def test_a_rank_that_fails_in_one_step_after_the_other_uses_up_its_restarts(tmp_path: Path) -> None:
    body = """if rank == 1 and step.index >= 5 and not (failed := here / f"failed-{step.index}").exists():
                    failed.touch()  # it may be back before the other rank has committed this step
                    raise OSError(f"in step {step.index}")"""
    path = training(tmp_path, steps=10**9, body=body)
    with Job(tmp_path, path, ranks=2, options=["--max-restarts", "2"]) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert len(re.findall(r"^OSError: in step \d+$", job.stderr, re.MULTILINE)) == 3
        error = "elasticgang: error: rank 1 exited with code 1; --max-restarts is 2 for each rank in an hour"
        assert job.stderr.splitlines()[-1] == error
        spawned = [event["local_rank"] for event in job.events() if event["event"] == "spawned"]
        assert spawned.count(1) == 3


def test_an_exception_while_the_model_is_built_ends_the_job_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, training(tmp_path, setup='if rank == 1: raise ValueError("while it builds")'), ranks=3) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("\nValueError: while it builds\n") == 1
        error = "elasticgang: error: rank 1 exited with code 1 before its first committed step"
        assert job.stderr.splitlines()[-1] == error
        spawned = [event["local_rank"] for event in job.events() if event["event"] == "spawned"]
        assert spawned.count(1) == 1


def test_a_rank_that_raises_and_does_not_exit_has_failed_when_it_is_killed(tmp_path: Path) -> None:
    """A thread of the script holds up its exit."""
    setup = """import threading"""
    body = """if rank == 1 and step.index == 5:
                    threading.Thread(target=time.sleep, args=(600,)).start()
                    raise ValueError("and a thread is left")
                if step.index > 5:  # until the other one is killed
                    time.sleep(0.05)"""
    path = training(tmp_path, steps=10**9, setup=setup, body=body)
    with Job(tmp_path, path, ranks=2, options=["--max-restarts", "0"]) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("\nValueError: and a thread is left\n") == 1
        assert job.stderr.splitlines()[-1] == "elasticgang: error: rank 1 exited with code 1; --max-restarts is 0"


def test_a_rank_that_is_interrupted_by_itself_is_restarted_as_after_any_kill(tmp_path: Path) -> None:
    body = """if rank == 1 and step.index == 3 and not (here / "failed").exists():
                    (here / "failed").touch()
                    os.kill(os.getpid(), signal.SIGINT)"""
    path = training(tmp_path, steps=8, body=body, after='print("finished", manager.committed_steps)')
    with Job(tmp_path, path, ranks=3) as job:
        assert job.wait() == 0, job.stderr
        assert "was killed by SIGINT" in job.stderr
        assert "Traceback" not in job.stderr


def test_an_interrupt_while_the_threads_of_a_script_are_waited_for_shows_no_traceback(tmp_path: Path) -> None:
    text = """\
    import atexit, signal, threading, time
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    def wait():
        while threading.main_thread().is_alive(): time.sleep(0.01)  # until threads are waited for
        print("over", flush=True)
        time.sleep(600)
    threading.Thread(target=wait).start()
    atexit.register(print, "functions are called", flush=True)
    """
    with Job(tmp_path, script(tmp_path, text), ranks=1) as job:
        wait_until(lambda: "over" in job.stdout or job.process.poll() is not None, "the end of the script")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 128 + signal.SIGINT
        job.assert_nothing_left()
        assert "functions are called" in job.stdout
        assert job.stderr == ""


def test_without_restarts_the_first_failure_ends_the_others(tmp_path: Path) -> None:
    path = training(tmp_path, steps=10**9, body='if rank == 1 and step.index == 3: raise RuntimeError("once")')
    with Job(tmp_path, path, ranks=3, options=["--max-restarts", "0"]) as job:
        assert job.wait() == 1
        job.assert_nothing_left()
        assert job.stderr.count("\nRuntimeError: once\n") == 1
        assert "rank 1 exited with code 1" in job.stderr


def test_a_restart_that_still_waits_does_not_hold_up_the_end(tmp_path: Path) -> None:
    setup = """if rank == 1:
            (here / "deaths").open("a").write("x")
            os.kill(os.getpid(), signal.SIGKILL)"""
    body = """while step.index == 1 and len((here / "deaths").read_text()) < 9: time.sleep(0.01)"""
    path = training(tmp_path, steps=3, setup=setup, body=body, after='print("over at", time.time(), flush=True)')
    with Job(tmp_path, path, ranks=2) as job:
        assert job.wait() == 0, job.stderr
        ended_at = time.time()
        (over_at,) = re.findall(r"over at ([0-9.]+)", job.stdout)
    assert ended_at - float(over_at) < 6.0  # the tenth start would be 8 s after the ninth death
    assert len((tmp_path / "deaths").read_text()) == 9


OWN_EXITS = [
    ("sys.exit(3)", 3, "rank 1 exited with code 3"),
    ("sys.exit('no data')", 1, "no data"),
    ("os._exit(7)", 7, "rank 1 exited with code 7"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 1 was killed by SIGSEGV"),
]


def test_the_scripts_own_exit_code_is_the_jobs(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        jobs = []
        for number, (statement, _, _) in enumerate(OWN_EXITS):
            directory = tmp_path / str(number)
            directory.mkdir()
            text = f"""\
            import os, signal, sys, time
            if os.environ["LOCAL_RANK"] == "1":
                {statement}
            time.sleep(600)
            """
            jobs.append(stack.enter_context(Job(directory, script(directory, text))))
        for job, (_, code, words) in zip(jobs, OWN_EXITS, strict=True):
            assert job.wait() == code
            job.assert_nothing_left()
            assert words in job.stderr


def test_a_script_that_never_joins_may_end(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """\
        import os, sys
        print("argv", sys.argv[1:], "rank", os.environ["LOCAL_RANK"], "of", os.environ["LOCAL_WORLD_SIZE"], __name__)
        sys.exit(0 if os.environ["LOCAL_RANK"] == "1" else None)
        """,
    )
    with Job(tmp_path, path, "--lr", "3e-4", "-x") as job:
        assert job.wait() == 0
        assert sorted(job.stdout.splitlines()) == [
            f"[rank {rank} step 0] argv ['--lr', '3e-4', '-x'] rank {rank} of 2 __main__" for rank in range(2)
        ]
        (line,) = job.stderr.splitlines()
        assert "exited with code 0 and never called `elasticgang.join`" in line


# LINK-1
def test_an_abort_does_not_keep_a_rank_from_hearing_its_agent(tmp_path: Path) -> None:
    """Meanwhile a callback holds up the reader of the comm process, whose end the notice must not wait for."""
    setup = """import threading
        from elasticgang import testing
        is_held, let_go, begun = threading.Event(), threading.Event(), threading.Event()
        testing.fail_at("abort_begun", begun.set)
        def hold(future):
            is_held.set()
            let_go.wait(60)"""
    body = """if step.index == 2 and not (here / "over").exists():
                    work = manager.gangs.root.all_reduce(torch.ones(1), eg.ReduceOperation.SUM, async_op=True) \\
                        if rank == 0 else None
                    if rank == 0:
                        held = work.get_future().then(hold)
                        (here / "set").touch()
                        is_held.wait(60)
                        (here / "held").write_text("yes\\n")
                        (here / "over").write_text(str(begun.wait(20)))
                        let_go.set()
                    else:
                        while not (here / "set").exists():
                            time.sleep(0.005)
                        manager.gangs.root.all_reduce(torch.ones(1), eg.ReduceOperation.SUM)"""
    path = training(tmp_path, steps=8, setup=setup, body=body)
    with Job(tmp_path, path, ranks=3) as job:
        job.expect_file(tmp_path / "held")
        os.kill(job.rank_pid(1), signal.SIGKILL)
        assert job.wait() == 0, job.stderr
        assert (tmp_path / "over").read_text() == "True"


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ("threading.Thread(target=until_told, name='upload').start()", r"threads 'upload' \(script\.py:\d+\), which"),
        ("atexit.register(until_told)", r"functions of `atexit` \(script\.py:\d+\)$"),
    ],
)
def test_a_process_that_goes_on_after_its_script_says_for_what_it_waits(waits: str, told: str, tmp_path: Path) -> None:
    define = "import atexit, threading\ndef until_told():\n    while not (here / 'go').exists(): time.sleep(0.05)\n"
    path = training(tmp_path, steps=2, after=waits)
    path.write_text(path.read_text().replace("manager = ", f"{define}manager = ", 1))
    with Job(tmp_path, path, ranks=1) as job:
        line = rf"the script ended 5 s ago, but its process goes on: it waits for (its )?{told}"
        wait_until(lambda: re.search(line, job.stderr, re.MULTILINE), "the line")
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.stderr
