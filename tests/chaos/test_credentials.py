"""Jobs of several agents whose processes authenticate each other, and agents that are not of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.several import Cluster, secret_options
from tests.integration.certificates import Authority
from tests.support import kill

pytestmark = pytest.mark.timeout(600)


def credentials(kind: str, directory: Path) -> list[str]:
    directory.mkdir()
    return secret_options(directory) if kind == "secret" else Authority(directory).issue().options


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("secret", "is not a coordinator of elasticgang with the same secret"),
        ("tls", "the certificate of the coordinator is refused: another CA has signed it"),
    ],
)
def test_ranks_heal_from_each_other_and_another_job_takes_no_part(
    tmp_path: Path, alone: str, kind: str, refusal: str
) -> None:
    own, others = credentials(kind, tmp_path / "own"), credentials(kind, tmp_path / "others")
    with Cluster(tmp_path / "job", holds=[4, 9], credentials=own) as cluster:
        stranger = cluster.start(ranks=1, options=["--connect-timeout", "6", *others])
        cluster.agents.remove(stranger)
        first = cluster.start(ranks=1)
        cluster.reached(4, 1)
        second = cluster.start(ranks=1)
        cluster.join_noticed(4, 1)
        cluster.release(4)
        cluster.reached(9, 2)  # one has healed from the other
        kill(second.rank_pid(0))
        cluster.release(9)
        cluster.check(alone, [first, second])
        assert stranger.wait() == 2
        assert refusal in stranger.stderr
