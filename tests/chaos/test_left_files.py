"""What a job leaves of the files that Python's `multiprocessing` makes for the processes of its ranks."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.training_scripts import training
from tests.support import Job, kill, wait_until

# Its workers send tensors, which makes a socket for each worker.
_SETUP = """class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 10**9
            def __getitem__(self, index):
                return torch.ones(2)
        batches_of_ones = iter(torch.utils.data.DataLoader(Data(), num_workers=2))"""
_BODY = """next(batches_of_ones)
                if (here / "over").exists():
                    manager.leave()"""


def sockets(directory: Path) -> list[Path]:
    """In directories below it, some of which may be deleted meanwhile: `os.walk` passes over these."""
    found = (Path(below) / name for below, _, names in os.walk(directory) for name in names)
    return sorted(path for path in found if path.name.startswith("listener-"))


# LEFT-1 LEFT-2
def test_no_socket_of_a_worker_outlives_its_rank_nor_its_agent(tmp_path: Path) -> None:
    path = training(tmp_path, steps=10**9, setup=_SETUP, body=_BODY)
    with TemporaryDirectory() as short:  # the path of a socket has 107 bytes at most
        here, env = Path(short), {"TMPDIR": short}
        with Job(tmp_path / "killed", path, ranks=2, env=env) as job:
            wait_until(lambda: len(sockets(here)) >= 4, "the sockets of four workers")
            first = sockets(here)
            job.expect("generation_change")  # without this one, the first generation would have begun without rank 1
            kill(job.rank_pid(1))
            job.expect("entered", local_rank=1, count=2)
            wait_until(lambda: len(set(first) & set(sockets(here))) == 2, "those of the dead rank to be deleted")
            wait_until(lambda: len(sockets(here)) >= 4, "those of its successor")
            kill(job.process.pid)
            job.process.wait()
            job.assert_nothing_left()
        assert sockets(here)
        with Job(tmp_path / "next", path, ranks=2, env=env) as job:
            wait_until(lambda: len(sockets(here)) >= 4 and not set(first) & set(sockets(here)), "the next job's")
            (tmp_path / "over").touch()
            assert job.wait() == 0, job.stderr
        assert not sockets(here)
        assert not [*here.glob("pymp-*"), *here.glob("eg-*")]
