"""Weights and checkpoints on an S3 server for tests. Skipped where moto and s3fs are not installed: they
need an older python-dateutil than constraints.txt has, and a minute to install."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

import elasticgang as eg
from elasticgang.checkpoint import listing
from elasticgang.checkpoint.locations import storage_at
from elasticgang.errors import CheckpointError
from tests.chaos.test_checkpoints import SCRIPT
from tests.integration.interchange_ranks import Model
from tests.integration.test_interchange import whole
from tests.support import Job, run_preloaded

moto = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FSSPEC_S3_ENDPOINT_URL", f"http://{host}:{port}")  # for other processes
        patched.setenv("AWS_ACCESS_KEY_ID", "test")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patched.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://{host}:{port}"})
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


def test_weights_are_loaded(bucket: str, tmp_path: Path) -> None:
    for path in whole(tmp_path, Model(1).state_dict()).glob("*.safetensors"):
        fsspec.filesystem("s3").put_file(str(path), f"bucket/weights/{path.name}")
    model = Model(2)
    assert eg.load_weights(model, f"{bucket}/weights") == 5
    for name, tensor in Model(1).state_dict().items():
        assert torch.equal(model.get_parameter(name), tensor), name


@pytest.mark.parametrize("where", ["bucket/empty", "absent/weights"])
def test_weights_that_are_not_there_are_refused(bucket: str, where: str) -> None:
    with pytest.raises(CheckpointError, match=f"s3://{where}"):
        eg.load_weights(Model(2), f"s3://{where}")


def test_a_job_saves_and_another_goes_on_there_and_all_is_listed_and_right(bucket: str, tmp_path: Path) -> None:
    location = f"{bucket}/run"
    for steps, ranks in ((10, 2), (20, 1)):
        arguments, options = [str(tmp_path), str(steps), "10"], ["--checkpoint-dir", location]
        with Job(tmp_path / str(steps), SCRIPT, *arguments, ranks=ranks, options=options, env={"WIDTH": "64"}) as job:
            assert job.wait() == 0, job.stderr
    assert f"loaded the checkpoint {location}/step-{10:012d}-" in job.stderr
    found = list(listing.scan(storage_at(location)))
    assert [each.attempt.step for each in found] == [20, 10]
    assert not any(each.problem for each in found)
    for command in (["checkpoints", location, "--verify"], ["export", location, str(tmp_path / "weights.pt")]):
        done = run_preloaded([sys.executable, "-m", "elasticgang", *command])
        assert done.returncode == 0, done.stderr
    weights = torch.load(tmp_path / "weights.pt")
    assert int(weights["steps"]) == 20
