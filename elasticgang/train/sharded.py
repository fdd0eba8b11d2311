"""Gradients of a sharded module, summed over the replica groups.

SHARDED-1  The module itself (`fully_shard`) reduces gradients within an sdp gang, during backward. After the last
    backward, this class sums each rank's part over the ranks that hold the same part.
SHARDED-2  Every rank reduces equally many bytes in the same order; a learner contributes zeros. So no rank waits for
    another's backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from elasticgang.collectives.work import Work
from elasticgang.gang import ReduceOperation
from elasticgang.member.manager import QuorumManager
from elasticgang.state.dtensor import like, local


class ShardedDataParallel(nn.Module):
    """Wraps `module`, of which each rank of an sdp gang holds a part, and sums its gradients over `manager.gangs.rdp`.

    For FSDP2 modules, `fully_shard(module, mesh=manager.gangs.device_mesh("sdp"))`: they then reduce sums over `sdp`
    instead of means, and `Optimizer.step(weight=)` divides them. `state_dict` is the module's.
    """

    def __init__(self, manager: QuorumManager, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._manager = manager
        self._parameters_in_order = list(module.parameters())
        self._sums: list[tuple[Tensor, list[nn.Parameter], Work]] = []
        for part in self._fsdp_modules():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        manager.add_reducer(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Use it around forward and backward of one slot. `last`: the rank's last slot."""
        self._manager.step.check()
        yield

    def contribute(self) -> None:
        """SHARDED-1, SHARDED-2."""
        if self._sums:
            return
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters_in_order:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            flat = torch.cat([self._gradient(parameter).flatten() for parameter in parameters])
            work = self._manager.reduction("rdp").all_reduce(flat, ReduceOperation.SUM, async_op=True)
            assert work is not None
            self._sums.append((flat, parameters, work))

    @staticmethod
    def _gradient(parameter: nn.Parameter) -> Tensor:
        return torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)

    def finish(self) -> None:
        for flat, parameters, work in self._sums:
            work.wait()
            parts = torch.split(flat, [local(parameter).numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = like(part.view(local(parameter).shape), parameter)
        self._sums = []

    def drop(self, *, rebuild: bool) -> None:
        for _, _, work in self._sums:
            work.wait()
        self._sums = []
        for parameter in self._parameters_in_order:
            parameter.grad = None
        if rebuild:
            for part in self._fsdp_modules():
                part.reshard()

    def close(self) -> None:
        self._sums, self._parameters_in_order = [], []

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)
