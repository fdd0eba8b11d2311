"""The Markdown documents as tests read them, and the programs that their Python blocks make.

A block shows what matters to its reader and takes the rest (a model, data) for granted. A `Program` adds that rest.
Each line `#: text` of its source stands for the one Python block that contains `text`, indented like that line.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
NUM_STEPS = 6  # in place of the documents' thousand
_PLACE = re.compile(r"^( *)#: (.+)\n", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. `line`: the number of its first line of code."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


@cache
def tokens(path: Path) -> tuple[Token, ...]:
    """All tokens of a document, those inside of paragraphs and tables too."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text()):
        found += [token, *(token.children or ())]
    return tuple(found)


def blocks(*languages: str) -> list[Block]:
    """Of every document. Without languages: all blocks."""
    return [
        Block(path, token.map[0] + 2, token.info, token.content)
        for path in DOCUMENTS
        for token in tokens(path)
        if token.type == "fence" and token.map is not None and (not languages or token.info in languages)
    ]


def links(path: Path) -> Iterator[str]:
    """What the document links to, with anchors."""
    for token in tokens(path):
        if token.type in ("link_open", "image"):
            yield str(token.attrGet("href") or token.attrGet("src"))


def inline_code(path: Path) -> Iterator[str]:
    """What stands between backticks in the document."""
    return (token.content for token in tokens(path) if token.type == "code_inline")


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    inside = (
        after for before, after in zip(tokens(path), tokens(path)[1:], strict=False) if before.type == "heading_open"
    )
    return {re.sub(r"[^\w\- ]", "", token.content.lower()).replace(" ", "-") for token in inside}


@dataclass(frozen=True)
class Program:
    """A script made of blocks. Each rank writes `{"key": value}` by `report(key=value)`, and must report `expected`.

    num_ranks: as many processes run it.
    """

    source: str
    num_ranks: int
    expected: dict[str, Any]

    def blocks(self) -> list[Block]:
        """The blocks that it runs."""
        return [block_with(match[2]) for match in _PLACE.finditer(self.source)]

    def script(self) -> str:
        """The whole program."""
        text = _PLACE.sub(lambda match: textwrap.indent(block_with(match[2]).text, match[1]), self.source)
        return _REPORT + re.sub(r"\bsteps\(1000\)", f"steps({NUM_STEPS})", text)


def block_with(text: str) -> Block:
    """The only Python block that contains `text`."""
    found = [block for block in blocks("python") if text in block.text]
    if len(found) != 1:
        raise ValueError(f"{text!r} must be in one Python block, but is in {[str(block) for block in found]}")
    return found[0]


def reports(directory: Path) -> list[dict[str, Any]]:
    """What each rank reported there."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.report"))]


_REPORT = """\
def report(**values):
    import json, os, pathlib

    pathlib.Path(os.environ["REPORTS"], f"{os.getpid()}.report").write_text(json.dumps(values))


"""

# For `elasticgang run`.
JOBS = {
    "loop": Program(
        """\
import torch
from torch import nn

torch.set_num_threads(1)
data = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))


def Model():
    torch.manual_seed(2)
    return nn.Linear(4, 4)


def loss_sum(model, samples):
    return (model(samples) - samples.flip(1)).square().sum()


before = loss_sum(Model(), data).item()
#: manager = eg.join(layout=eg.ParallelLayout())
after = loss_sum(model.module, data).item()
report(committed=manager.committed_steps, size=manager.gangs.dp.size, is_better=after < before)
""",
        num_ranks=2,
        expected={"committed": NUM_STEPS, "size": 2, "is_better": True},
    ),
    "loader": Program(
        """\
import torch
from torch import nn

import elasticgang as eg

torch.set_num_threads(1)
dataset = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))


def loss_sum(model, samples):
    return (model(samples) - samples.flip(1)).square().sum()


torch.manual_seed(2)
manager = eg.join()
module = nn.Linear(4, 4)
before = loss_sum(module, dataset).item()
model = eg.DistributedDataParallel(manager, module)
optim = eg.Optimizer(manager, torch.optim.AdamW(model.parameters()))
manager.register_state(model=model, optim=optim)
weights = torch.ones(len(dataset))
#: def weighted(seed, step)
#: loader = eg.DataLoader(
after = loss_sum(module, dataset).item()
report(committed=manager.committed_steps, size=manager.gangs.dp.size, is_better=after < before)
""",
        num_ranks=2,
        expected={"committed": NUM_STEPS, "size": 2, "is_better": True},
    ),
    "streams": Program(
        """\
import warnings

import torch
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import elasticgang as eg

torch.set_num_threads(1)
warnings.filterwarnings("ignore", "'set_vital' is deprecated")
data = torch.randn(64, 9, 4, generator=torch.Generator().manual_seed(1))


class Shard(IterableDataset):
    def __init__(self, number):
        self.samples, self.place = data[number], 0

    def __iter__(self):
        while self.place < len(self.samples):
            self.place += 1
            yield self.samples[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def loss_sum(model, samples):
    return (model(samples) - samples.flip(1)).square().sum()


torch.manual_seed(2)
manager = eg.join()
module = nn.Linear(4, 4)
before = loss_sum(module, data[0]).item()
model = eg.DistributedDataParallel(manager, module)
optim = eg.Optimizer(manager, torch.optim.AdamW(model.parameters()))
#: loader = eg.StreamLoader(
for step in manager.steps(1000):
    with step:
        slots = loader.slots(step)
        for slot, batch in slots:
            with model.accumulate(last=slot.last):
                loss_sum(model, batch).backward()
        optim.step(weight=slots.num_samples)
after = loss_sum(module, data[0]).item()
report(committed=manager.committed_steps, size=manager.gangs.dp.size, is_better=after < before)
""",
        num_ranks=2,
        expected={"committed": NUM_STEPS, "size": 2, "is_better": True},
    ),
    "pipeline": Program(
        """\
import torch
from torch import nn

import elasticgang as eg

torch.set_num_threads(1)
data = torch.randn(64, 9, 2, 4, generator=torch.Generator().manual_seed(1))


class Shard:
    def __init__(self, number):
        self.number, self.place = number, 0

    def __iter__(self):
        while self.place < len(data[0]):
            self.place += 1
            yield tuple(data[self.number, self.place - 1])
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def loss_sum(outputs, targets):
    return (outputs - targets).square().sum()


manager = eg.join(layout=eg.ParallelLayout(pp=2))
loader = eg.StreamLoader(manager, Shard, num_splits=64, size=64, slot=8, num_workers=1)


def build(seat):
    meta = torch.empty(8, 4, device="meta")
    torch.manual_seed(seat.pp)
    model = eg.PipelineParallel(manager, nn.Linear(4, 4), inputs=meta, outputs=meta, loss_sum=loss_sum)
    optim = eg.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=0.01))
    return {"model": model, "optim": optim, "stream": loader}


state = manager.build(build)
losses_on = []
for step in manager.steps(1000):
    with step:
        #: batches = slots.load()
        state.optim.step(weight=slots.num_samples)
        losses_on.append((manager.gangs.pp.rank, len(losses)))
report(committed=manager.committed_steps, size=manager.gangs.pp.size, has_run=set(losses_on) <= {(0, 0), (1, 8)})
""",
        num_ranks=2,
        expected={"committed": NUM_STEPS, "size": 2, "has_run": True},
    ),
    "parts": Program(
        """\
import elasticgang as eg
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_num_threads(1)
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
data = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
batches = eg.GlobalBatch(len(data), size=64, slot=8, seed=0)


class Model(nn.Module):
    def __init__(self, seat):
        super().__init__()
        assert (seat.pp, seat.sdp, seat.tp) == tuple(getattr(manager.gangs, name).rank for name in ("pp", "sdp", "tp"))
        torch.manual_seed(2)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, inputs):
        return self.norms[1](self.layers(self.norms[0](inputs)))


def loss_sum(model, samples):
    return (model(samples) - samples.flip(1)).square().sum()


#: state = manager.build(build)
parameters = dict(state.model.module.named_parameters())
report(
    committed=manager.committed_steps,
    axes=sorted({axis for each in parameters.values() for axis in each.device_mesh.mesh_dim_names}),
    is_trained=all(bool((norm.weight.to_local() != 1).all()) for norm in state.model.module.norms),
)
""",
        num_ranks=4,
        expected={"committed": NUM_STEPS, "axes": ["sdp", "tp"], "is_trained": True},
    ),
    "checkpoints": Program(
        """\
import elasticgang as eg
import torch

torch.set_num_threads(1)
manager = eg.join()
model = eg.DistributedDataParallel(manager, torch.nn.Linear(4, 4))
optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters()))
manager.register_state(model=model, optim=optim)
#: manager.checkpoints("runs/checkpoints"
for step in manager.steps(1000):
    with step:
        with model.accumulate(last=True):
            model(torch.ones(1, 4)).sum().backward()
        optim.step(weight=1.0)
report(committed=manager.committed_steps)
""",
        num_ranks=2,
        expected={"committed": NUM_STEPS},
    ),
}

# For ranks that are given RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun gives them.
GANGS = Program(
    """\
import elasticgang as eg
import torch

torch.set_num_threads(1)
tensor = torch.tensor([1.0])
#: gangs = eg.create_parallel_gangs(root, tp_size=2)
tensor.fill_(float(root.rank))
gangs["cp"].all_reduce(tensor, eg.ReduceOperation.SUM)  # with the other rank of [0, 2], [1, 3], [4, 6] or [5, 7]
assert tensor.item() == 2 * (root.rank & ~2) + 2, tensor
report(sizes={name: gangs[name].size for name in ("root", "tp", "cp", "rdp")})
root.barrier()  # a rank that ends closes its connections, while others may still make theirs
""",
    num_ranks=8,
    expected={"sizes": {"root": 8, "tp": 2, "cp": 2, "rdp": 2}},
)

# For ranks that are given rank and size as arguments.
PROCESS_GROUPS = Program(
    """\
#: pg = create_process_group("isolated-gloo", timeout=30.0)
report(last=tensor.item())
""",
    num_ranks=2,
    expected={"last": 3.0},
)

PROGRAMS = (*JOBS.values(), GANGS, PROCESS_GROUPS)
