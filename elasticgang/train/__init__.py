"""Parts of the training loop: the voting optimizer, data-parallel gradients, the global batch, and `join`."""

from elasticgang.train.data import GlobalBatch, Slot, Slots
from elasticgang.train.data_loader import DataLoader, LoadedSlots
from elasticgang.train.ddp import DistributedDataParallel
from elasticgang.train.join import join
from elasticgang.train.optimizer import Optimizer
from elasticgang.train.pipeline import PipelineParallel
from elasticgang.train.sharded import ShardedDataParallel
from elasticgang.train.stream_loader import StreamLoader
from elasticgang.train.stream_reader import Split

__all__ = [
    "DataLoader",
    "DistributedDataParallel",
    "GlobalBatch",
    "LoadedSlots",
    "Optimizer",
    "PipelineParallel",
    "ShardedDataParallel",
    "Slot",
    "Slots",
    "Split",
    "StreamLoader",
    "join",
]
