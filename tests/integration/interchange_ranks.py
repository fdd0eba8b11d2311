"""Another trainer's checkpoint of a model that `fully_shard` divides over two ranks: plain torch, by
`torch.distributed.checkpoint` alone. `python interchange_ranks.py DIRECTORY [--consolidate]`, on two ranks."""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(3)
        self.down = nn.Linear(5, 7, bias=False, dtype=torch.bfloat16)


def main() -> None:
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")  # torch's own, of what it calls
    model = Model(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    writer = HuggingFaceStorageWriter(
        sys.argv[1], save_distributed=True, enable_consolidation="--consolidate" in sys.argv
    )
    save(model.state_dict(), storage_writer=writer)
    dist.destroy_process_group()
    os._exit(0)  # torch's threads that write


if __name__ == "__main__":
    main()
