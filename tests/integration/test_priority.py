"""The priority of agents and coordinators: their loop's, and nobody else's."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from elasticgang.process import futex
from elasticgang.process.priority import NICENESS
from tests.chaos.several import Coordinator
from tests.chaos.training_scripts import training
from tests.exhaustive import exhaustive
from tests.support import Job, kill, wait_until

RAISED = """
import os, subprocess, sys, threading
from elasticgang.process.priority import raise_priority
{before}
raise_priority()
seen = [os.getpriority(os.PRIO_PROCESS, 0)]
thread = threading.Thread(target=lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
thread.start()
thread.join()
asked = "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"
seen.append(int(subprocess.check_output([sys.executable, "-c", asked])))
if os.fork() == 0:
    os._exit(os.getpriority(os.PRIO_PROCESS, 0))
seen.append(os.waitstatus_to_exitcode(os.wait()[1]))
print(seen)
"""


def priorities(before: str = "", prefix: Sequence[str] = ()) -> list[int]:
    """Of a process's first thread, another thread, a program that it starts, and a process that it forks."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", RAISED.format(before=before)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return [int(word) for word in done.stdout.strip()[1:-1].split(",")]


def may_lower() -> bool:
    lowered = "import os; os.setpriority(os.PRIO_PROCESS, 0, -10)"
    return subprocess.run([sys.executable, "-c", lowered], capture_output=True, timeout=60).returncode == 0


needs_the_right = pytest.mark.skipif(not may_lower(), reason="needs the right to lower its niceness")


# PRIORITY-OWN
@needs_the_right
def test_only_the_thread_that_asks_has_the_priority() -> None:
    assert priorities() == [NICENESS, 0, 0, 0]


# PRIORITY-USER
def test_what_the_user_chose_is_kept() -> None:
    assert priorities("os.setpriority(os.PRIO_PROCESS, 0, 5)")[:2] == [5, 5]
    chosen = "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    assert priorities(chosen) == [0, 0, 0, 0]


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="needs `setpriv`")
def test_without_the_right_nothing_fails() -> None:
    dropped = [] if os.geteuid() else ["setpriv", "--bounding-set", "-sys_nice"]
    assert priorities(prefix=dropped) == [0, 0, 0, 0]


@needs_the_right
@pytest.mark.timeout(240)
def test_coordinators_and_agents_have_it_and_the_ranks_have_not(tmp_path: Path) -> None:
    path = training(tmp_path, steps=100_000, body='time.sleep(0.01); (here / f"at-{rank}").write_text("1\\n")')
    with Coordinator(tmp_path / "apart") as apart:
        assert apart.address
        assert os.getpriority(os.PRIO_PROCESS, apart.process.pid) == NICENESS
    with Job(tmp_path, path) as job:
        job.expect_file(tmp_path / "at-0")
        raised = {job.coordinator().pid, job.process.pid}
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in raised] == [NICENESS, NICENESS]
        agent = psutil.Process(job.process.pid)
        num = 1 + 2 * futex.is_available()  # its loop, and what watches for the death of each rank
        wait_until(lambda: thread_niceness(agent).count(NICENESS) >= num, "its threads have the priority")
        others = [process for process in job.processes() if process.pid not in raised]
        assert job.rank_pid(0) in {process.pid for process in others}
        assert min(niceness for process in others for niceness in thread_niceness(process)) >= 0


UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
AUTOGROUP = Path("/proc/self/autogroup")
WEIGHED = """
import os, subprocess, sys
from elasticgang.process.priority import weigh_session
for num in map(int, sys.argv[1:]):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True, preexec_fn={before}) as process:
        weigh_session(process.pid, num, {chosen})
        print(open(f"/proc/{{process.pid}}/autogroup").read().split()[-1])
"""


def may_unshare() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*UNSHARE, "true"], check=False).returncode == 0


needs_sessions = pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")


def weights(*nums: int, before: str = "None", chosen: int = 0, prefix: Sequence[str] = ()) -> list[int]:
    """The niceness of a session that counts as so many."""
    command = [*prefix, sys.executable, "-c", WEIGHED.format(before=before, chosen=chosen), *map(str, nums)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return [int(line) for line in done.stdout.split()]


# PRIORITY-SESSION
@needs_the_right
@needs_sessions
def test_a_session_has_the_weight_of_as_many() -> None:
    """By the kernel's table of weights, a step of niceness is about 1.25."""
    assert weights(1, 2, 4, 8, 16, 1000) == [0, -3, -6, -9, -12, -20]


# PRIORITY-SESSION, PRIORITY-USER
@needs_the_right
@needs_sessions
def test_a_session_of_a_nice_job_keeps_its_weight() -> None:
    nice = "lambda: __import__('os').nice(5)"
    assert weights(4, before=nice) == [0]
    assert weights(4, before=nice, chosen=7) == [7]


# PRIORITY-SESSION
@needs_sessions
@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="needs `setpriv`")
def test_without_the_right_a_session_has_the_weight_of_one() -> None:
    assert weights(4, prefix=[] if os.geteuid() else ["setpriv", "--bounding-set", "-sys_nice"]) == [0]


LEADING = """
import os, threading
from elasticgang.process.priority import raise_priority, weigh_own_session
{before}
raise_priority()
thread = threading.Thread(target=weigh_own_session)
thread.start()
thread.join()
print(open("/proc/self/autogroup").read().split()[-1])
"""


def niceness_of_own_session(before: str = "pass", *, leads: bool = True, prefix: Sequence[str] = ()) -> int:
    """The niceness of the session, a new one, of a process that asks for the largest weight."""
    own = AUTOGROUP.read_text()
    leader = [] if leads else [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"]
    command = [*leader, *prefix, sys.executable, "-c", LEADING.format(before=before)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert AUTOGROUP.read_text() == own
    return int(done.stdout)


# PRIORITY-LEADER
@needs_the_right
@needs_sessions
def test_a_process_gives_the_session_that_it_leads_the_largest_weight() -> None:
    assert niceness_of_own_session() == -20


# PRIORITY-LEADER
@needs_the_right
@needs_sessions
def test_a_session_that_another_process_leads_keeps_its_weight() -> None:
    assert niceness_of_own_session("assert os.getsid(0) == os.getppid()", leads=False) == 0


# PRIORITY-LEADER, PRIORITY-USER
@needs_the_right
@needs_sessions
def test_a_session_that_the_user_has_made_nice_keeps_its_weight() -> None:
    assert niceness_of_own_session("open('/proc/self/autogroup', 'w').write('7')") == 7


# PRIORITY-LEADER, PRIORITY-USER
@needs_the_right
@needs_sessions
@pytest.mark.parametrize("niceness", [5, -5, NICENESS])
def test_the_session_of_a_process_with_another_niceness_keeps_its_weight(niceness: int) -> None:
    assert niceness_of_own_session(f"os.setpriority(os.PRIO_PROCESS, 0, {niceness})") == 0


# PRIORITY-LEADER, PRIORITY-SESSION, PRIORITY-USER
@needs_the_right
@needs_sessions
@pytest.mark.parametrize("policy", ["BATCH", "IDLE"])
def test_the_session_of_a_process_with_another_policy_keeps_its_weight(policy: str) -> None:
    chosen = f"os.sched_setscheduler(0, os.SCHED_{policy}, os.sched_param(0))"
    assert niceness_of_own_session(chosen) == 0
    assert weights(4, before=f"lambda: {chosen}") == [0]


# PRIORITY-LEADER
@needs_sessions
@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="needs `setpriv`")
def test_without_the_right_an_own_session_keeps_its_weight() -> None:
    assert niceness_of_own_session(prefix=[] if os.geteuid() else ["setpriv", "--bounding-set", "-sys_nice"]) == 0


def weight(pid: int) -> str:
    """The niceness of the process's session."""
    return Path(f"/proc/{pid}/autogroup").read_text().split()[-1]


# PRIORITY-LEADER
@needs_the_right
@needs_sessions
@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs `setsid`")
def test_agents_and_coordinators_weigh_their_sessions(tmp_path: Path) -> None:
    path = training(tmp_path, steps=100_000, body='time.sleep(0.01); (here / f"at-{rank}").write_text("1\\n")')

    with Coordinator(tmp_path / "apart", prefix=["setsid"]) as apart:
        assert apart.address
        assert weight(apart.process.pid) == "-20"
    with Job(tmp_path, path, prefix=["setsid"]) as job:
        job.expect_file(tmp_path / "at-0")
        assert weight(job.process.pid) == "-20"


# PRIORITY-USER, PRIORITY-LAST
@needs_the_right
@needs_sessions
def test_the_sessions_of_a_job_have_the_niceness_of_that_in_which_it_was_started(tmp_path: Path) -> None:
    path = training(tmp_path, steps=100_000, body='time.sleep(0.01); (here / f"at-{rank}").write_text("1\\n")')
    made_nice = [sys.executable, "-c", MADE_NICE, "3"]
    with Job(tmp_path, path, prefix=made_nice, options=["--status-port", "0"]) as job:
        job.expect_file(tmp_path / "at-0")
        server = job.page_server()
        pids = [job.process.pid, job.rank_pid(0), server.pid]
        assert len({os.getsid(pid) for pid in pids}) == 3
        wait_until(lambda: [weight(pid) for pid in pids] == ["3", "3", "10"], "their sessions are nice")


MADE_NICE = """
import os, sys
os.setsid()
open("/proc/self/autogroup", "w").write(sys.argv[1])
os.execv(sys.argv[2], sys.argv[2:])
"""
GIVING_WAY = """
import os
from elasticgang.process.priority import give_way, session_niceness
give_way(5, {})
print(os.getpriority(os.PRIO_PROCESS, 0), session_niceness())
"""


# PRIORITY-LAST, PRIORITY-USER
@needs_the_right
@needs_sessions
@pytest.mark.parametrize(
    ("chosen", "leads", "niceness"), [(0, True, 5), (3, True, 5), (12, True, 12), (-7, True, 5), (12, False, 0)]
)
def test_what_gives_way_makes_its_own_session_nice_alone(chosen: int, leads: bool, niceness: int) -> None:
    leader = [] if leads else [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"]
    command = [*leader, sys.executable, "-c", GIVING_WAY.format(chosen)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert done.stdout.split() == ["5", str(niceness)]


# PRIORITY-USER
@needs_the_right
@needs_sessions
@pytest.mark.parametrize(("niceness", "chosen"), [(7, 7), (-7, -7), (-20, 0)])
def test_the_weight_of_an_agent_is_no_choice_of_the_user(niceness: int, chosen: int) -> None:
    """Another agent, which does not lead the session, reads it."""
    code = f"""if True:
        import subprocess, sys
        open("/proc/self/autogroup", "w").write("{niceness}")
        asked = "from elasticgang.process.priority import session_niceness; print(session_niceness())"
        subprocess.run([sys.executable, "-c", asked], check=True)"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert int(done.stdout) == chosen


# PRIORITY-LAST
@needs_sessions
def test_what_serves_the_page_gives_way_to_the_ranks(tmp_path: Path) -> None:
    path = training(tmp_path, steps=100_000, body='time.sleep(0.01); (here / f"at-{rank}").write_text("1\\n")')
    with Job(tmp_path, path, options=["--status-port", "0"]) as job:
        job.expect_file(tmp_path / "at-0")
        server = job.page_server()
        autogroup = Path(f"/proc/{server.pid}/autogroup")
        wait_until(lambda: autogroup.read_text().endswith(" nice 10\n"), "its session is nice")
        assert os.getpriority(os.PRIO_PROCESS, server.pid) == 10
        assert os.getsid(server.pid) == server.pid


def without_a_weight() -> list[str]:
    """A command that runs another one in a session without a weight, as that of a container's first process is."""
    if not may_unshare():
        pytest.skip("needs `unshare`")
    empty = 'mount --bind /dev/null /proc/$$/autogroup && ! grep . "/proc/$$/autogroup" && exec "$@"'
    return [*UNSHARE, "sh", "-c", empty, "sh"]


# PRIORITY-SESSION
@exhaustive
@needs_sessions
@pytest.mark.timeout(240)
def test_a_job_runs_in_a_session_without_a_weight(tmp_path: Path) -> None:
    path = training(tmp_path, steps=3)
    with Job(tmp_path, path, prefix=without_a_weight(), options=["--status-port", "0"]) as job:
        assert job.wait() == 0


# PRIORITY-SESSION, PRIORITY-LEADER, PRIORITY-LAST
@needs_sessions
def test_a_session_without_a_weight_stays_as_it_is() -> None:
    code = """if True:
        import os
        from elasticgang.process.priority import give_way, session_niceness, weigh_own_session, weigh_session
        assert os.getsid(0) == os.getpid()
        assert open("/proc/self/autogroup").read() == ""
        weigh_own_session()
        weigh_session(os.getpid(), 4)
        weigh_session(os.getpid(), 4, 7)
        give_way(5, 7)
        print(session_niceness(), os.getpriority(os.PRIO_PROCESS, 0))"""
    command = [*without_a_weight(), sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert done.stdout.split() == ["0", "5"]


# PRIORITY-SESSION
@exhaustive
@needs_the_right
@needs_sessions
@pytest.mark.timeout(240)
def test_the_ranks_of_a_job_are_a_session_of_their_weight(tmp_path: Path) -> None:
    """Also those that a new fork server starts."""
    body = 'here.joinpath(f"group-{os.getpid()}").write_text(open("/proc/self/autogroup").read())'
    path = training(tmp_path, steps=100_000, body=f"time.sleep(0.01); {body}")
    with Job(tmp_path, path, ranks=2) as job:

        def groups() -> set[str]:
            return {group.read_text() for group in tmp_path.glob("group-*")} - {""}

        wait_until(lambda: len(list(tmp_path.glob("group-*"))) == 2, "both ranks")
        (first,) = wait_until(groups, "their groups")
        assert first.split()[1:] == ["nice", "-3"]
        job.fork_server().kill()
        kill(job.rank_pid(1))
        wait_until(lambda: len(groups()) == 2, "a rank of another fork server")
        assert {group.split()[-1] for group in groups()} == {"-3"}


def thread_niceness(process: psutil.Process) -> list[int]:
    found = []
    with contextlib.suppress(psutil.Error):  # it has just ended
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                found.append(os.getpriority(os.PRIO_PROCESS, thread.id))
    return found
