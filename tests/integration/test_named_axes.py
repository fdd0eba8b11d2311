"""Further axes of a running job: `manager.gangs["cp"]` in each generation, and alone."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from elasticgang.errors import LayoutError
from elasticgang.gang import FakeGang, Gangs
from elasticgang.layout import Axes, ParallelLayout
from elasticgang.member.local_rendezvous import LocalRendezvous
from tests.support import Command, Job

CPU = torch.device("cpu")


def script(directory: Path, layout: str, body: str) -> Path:
    """`total(name)`: the sum over that gang of what each rank has of its own, 10 to the power of its rank."""
    path = directory / "script.py"
    path.write_text(
        textwrap.dedent(
            f"""\
            import os, pathlib, signal
            import torch
            import elasticgang as eg
            from elasticgang import Axes

            here = pathlib.Path({str(directory)!r})
            manager = eg.join(layout=eg.ParallelLayout({layout}))
            seen = {{}}

            def total(name):
                gangs = eg.get_current_gangs()
                seen.setdefault(name, gangs[name])
                assert gangs[name] is manager.gangs[name] is seen[name], "the same objects in each generation"
                tensor = torch.tensor([10 ** gangs.root.rank])
                gangs[name].all_reduce(tensor, eg.ReduceOperation.SUM)
                return f"{{name}} {{gangs[name].rank}}/{{gangs[name].size}} {{int(tensor)}}"

            for step in manager.steps(4):
                with step:
            """
        )
        + textwrap.indent(textwrap.dedent(body), " " * 8)
    )
    return path


def test_gangs_along_further_axes_of_a_job(tmp_path: Path) -> None:
    """Over four ranks that shard: adjacent pairs, and pairs across them, as no family has them."""
    path = script(
        tmp_path,
        'sdp=4, views=(Axes((2, 2), ("cp", "outer")), Axes((4,), ("ep",)))',
        """\
        lines = [total(name) for name in ("cp", "outer", "ep", "sdp")]
        mesh = manager.gangs.device_mesh("outer", "cp")
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert mesh.get_group("cp") is manager.gangs["cp"].as_process_group()
        grid = eg.GangGrid([2, 2], ["a", "b"], root=manager.gangs.root)
        assert grid.create_gangs()["b"].size == 2
        if manager.commit(1.0, lambda total: None) and step.index == 3:
            print(manager.gangs.root.rank, *lines, *manager.gangs, sep=", ")
        """,
    )
    with Job(tmp_path, path, ranks=4) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
        names = "root, dp, rdp, sdp, tp, pp, cp, outer, ep"
        assert sorted(line.partition("] ")[2] for line in job.stdout.splitlines()) == [
            f"{rank}, cp {rank % 2}/2 {cp}, outer {rank // 2}/2 {outer}, ep {rank}/4 1111, sdp {rank}/4 1111, {names}"
            for rank, (cp, outer) in enumerate([(11, 101), (11, 1010), (1100, 101), (1100, 1010)])
        ]


def test_they_are_gangs_of_the_next_generation_when_a_rank_has_died(tmp_path: Path) -> None:
    """Two replica groups of two; without a member of one, the other goes on, and later both."""
    path = script(
        tmp_path,
        'sdp=2, views=(Axes((2, 1), ("cp", "none")),)',
        """\
        line, generation, size = total("cp") + " " + total("none"), manager.generation, manager.gangs.root.size
        if os.environ["LOCAL_RANK"] == "3" and not (here / "killed").exists():
            (here / "killed").touch()
            os.kill(0, signal.SIGKILL)
        if manager.commit(1.0, lambda total: None):  # otherwise rank 2's sum may have been lost with the step
            (here / f"{generation}-{size}-{step.index}-{os.getpid()}").write_text(line)
        """,
    )
    with Job(tmp_path, path, ranks=4) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    generations = set()
    for file in tmp_path.glob("*-*-*-*"):
        generation, size, *_ = map(int, file.name.split("-"))
        generations.add(generation)
        assert file.read_text() in {
            f"cp {rank % 2}/2 {(11, 1100)[rank // 2]} none 0/1 {10**rank}" for rank in range(size)
        }
    assert max(generations) > 1


def test_alone_they_are_fake_gangs_of_one() -> None:
    layout = ParallelLayout(views=(Axes((1, 1), ("cp", "ep")),))
    gangs: Gangs = LocalRendezvous(layout, CPU).gangs
    assert list(gangs)[6:] == ["cp", "ep"]
    assert isinstance(gangs["cp"], FakeGang)
    assert (gangs["cp"].rank, gangs["cp"].size) == (0, 1)
    with pytest.raises(LayoutError, match="needs 4 ranks, but this process is alone"):
        LocalRendezvous(ParallelLayout(sdp=4, views=(Axes((4,), ("cp",)),)), CPU)


def test_a_script_with_further_axes_runs_alone(tmp_path: Path) -> None:
    path = script(
        tmp_path, 'views=(Axes((1,), ("cp",)),)', 'print(total("cp"))\nmanager.commit(1.0, lambda total: None)\n'
    )
    with Command(tmp_path / "alone", [sys.executable, str(path)], preloaded=True) as command:
        assert command.wait() == 0, command.stderr
        assert command.stdout.splitlines() == ["cp 0/1 1"] * 4


def test_ranks_with_other_views_are_refused(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        'sdp=2, views=(Axes((2,), ("cp" if os.environ["LOCAL_RANK"] == "0" else "ep",)),)',
        'raise AssertionError("not reached")\n',
    )
    with Job(tmp_path, path, ranks=2) as job:
        assert job.wait() == 2
        assert "declares ParallelLayout(pp=1, sdp=2" in job.stderr
        assert "but the other ranks ParallelLayout(" in job.stderr
