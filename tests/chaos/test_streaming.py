"""MosaicML Streaming by index in a job whose ranks and data workers are killed; skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticgang.train.data import GlobalBatch
from tests.chaos.test_examples import FAULTS, run
from tests.documents import block_with

JOB = Path(__file__).with_name("streaming_job.py")
BATCHES = GlobalBatch(512, size=32, slot=4)


def test_a_streaming_dataset_counts_each_sample_once_whoever_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming = pytest.importorskip("streaming", exc_type=ImportError)
    monkeypatch.setenv("BLOCK", block_with("StreamingDataset(").text.replace("s3://bucket", str(tmp_path)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with streaming.MDSWriter(out=str(tmp_path / "shards"), columns={"number": "int"}, size_limit=1000) as writer:
        for number in range(512):
            writer.write({"number": number})
    killed, _ = run(tmp_path / "killed", JOB, BATCHES, 3, FAULTS)
    alone, _ = run(tmp_path / "alone", JOB, BATCHES, 1, [])
    assert len(killed) == 1
    assert killed == alone
