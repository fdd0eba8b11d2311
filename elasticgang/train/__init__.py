"""Parts of the training loop: the voting optimizer, data-parallel gradients, the global batch, and `join`."""

from elasticgang.train.data import GlobalBatch, Slot, Slots
from elasticgang.train.ddp import DistributedDataParallel
from elasticgang.train.join import join
from elasticgang.train.optimizer import Optimizer
from elasticgang.train.sharded import ShardedDataParallel

__all__ = ["DistributedDataParallel", "GlobalBatch", "Optimizer", "ShardedDataParallel", "Slot", "Slots", "join"]
