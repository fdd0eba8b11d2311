"""The training loop's parts: the optimizer that votes, data-parallel gradients, the global batch."""

from elasticgang.train.data import GlobalBatch, Slot, Slots
from elasticgang.train.ddp import DistributedDataParallel
from elasticgang.train.join import join
from elasticgang.train.optimizer import Optimizer

__all__ = ["DistributedDataParallel", "GlobalBatch", "Optimizer", "Slot", "Slots", "join"]
