"""Data sets of other packages in the loaders, where these packages are installed. No test needs a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import run_preloaded

HEAD = """
import sys
from collections import Counter
from pathlib import Path

import torch
import elasticgang as eg

torch.set_num_threads(1)
manager = eg.join()
model = eg.DistributedDataParallel(manager, torch.nn.Linear(1, 1))
optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
batches = eg.GlobalBatch(64, size=16, slot=4)
"""
TRAIN = """
seen = Counter()
for step in manager.steps(8):
    with step:
        slots = loader.slots(step)
        for slot, batch in slots:
            assert stream is not None or batch["number"].tolist() == slot.index.tolist()
            with model.accumulate(last=slot.last):
                model(batch["number"][:, None].float()).sum().backward()
            seen.update(batch["number"].tolist())
        optim.step(weight=slots.num_samples)
loader.close()
assert seen == dict.fromkeys(range(64), 2), seen
"""
BY_INDEX = """
stream = None
loader = eg.DataLoader(dataset, batches, num_workers=2)
manager.register_state(model=model, optim=optim)
"""
PROGRAMS = {
    "datasets": """
from datasets import Dataset
dataset = Dataset.from_dict({"number": list(range(64))}).with_format("torch")
"""
    + BY_INDEX,
    "datasets, as streams": """
from datasets import IterableDataset

def numbers(first):
    for each in first:
        yield from ({"number": number} for number in range(each, each + 8))

def open_split(number):
    return IterableDataset.from_generator(numbers, gen_kwargs={"first": [8 * number]}).with_format("torch")

stream = loader = eg.StreamLoader(manager, open_split, num_splits=8, size=16, slot=4, num_workers=2)
manager.register_state(model=model, optim=optim, stream=stream)
""",
    "streaming": """
from streaming import MDSWriter, StreamingDataset

with MDSWriter(out=sys.argv[1], columns={"number": "int"}, size_limit=400) as writer:
    for number in range(64):
        writer.write({"number": number})
dataset = StreamingDataset(local=sys.argv[1], batch_size=4, shuffle=False)
"""
    + BY_INDEX,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_sample_is_seen_once_in_a_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name.partition(",")[0], exc_type=ImportError)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text(HEAD + PROGRAMS[name] + TRAIN)
    done = run_preloaded([sys.executable, str(script), str(tmp_path / "shards")], timeout=110)
    assert done.returncode == 0, done.stderr
