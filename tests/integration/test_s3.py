"""Weights on an S3 server for tests. Skipped where moto and s3fs are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

import elasticgang as eg
from elasticgang.errors import CheckpointError
from tests.integration.interchange_ranks import Model
from tests.integration.test_interchange import whole

moto = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patched:
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
