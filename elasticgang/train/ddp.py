"""Data-parallel gradients: torch's own DistributedDataParallel, reduced over the gang.

R1' Building communicates nothing, so that a newcomer builds while the others train.
R2' The buckets are fixed when built (`find_unused_parameters=True` keeps torch from rebuilding them after the first
    backward), so that a newcomer's are the same as a veteran's.
R3' The communication hook never raises and its future never fails: an exception inside backward breaks DDP's next step.
"""

# No `from __future__ import annotations` here: torch compares the annotations of communication hooks with its classes.

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torchft.process_group import ProcessGroupDummy

from elasticgang.gang import ElasticGang
from elasticgang.quorum.manager import QuorumManager

_Reduced = tuple[list[Tensor], list[Tensor]]


class DistributedDataParallel(nn.Module):
    """`module`, with its gradients summed over `manager.gangs.dp`, or only over the replica groups (`over="rdp"`), for
    a module of which each rank of an `sdp` gang holds a part.

    Gradients are sums, not means: `Optimizer.step(weight=)` divides them by the total weight. Backward must run inside
    `accumulate`; the one with `last=True` reduces. Its `state_dict` is the module's.
    """

    def __init__(
        self, manager: QuorumManager, module: nn.Module, *, over: str = "dp", bucket_cap_mb: float = 25.0
    ) -> None:
        """Raises ValueError when `over` is neither "dp" nor "rdp"."""
        super().__init__()
        if over not in ("dp", "rdp"):
            raise ValueError(f'`over` must be "dp" or "rdp", but is {over!r} instead.')
        self._over = over
        self.module = module
        self._manager = manager
        self._bucket_cap_mb = bucket_cap_mb
        self._pending: list[Future[Tensor]] = []
        self._reduced: list[_Reduced] = []
        self._build()
        manager.add_reducer(self)

    def _build(self) -> None:
        # DDP itself sees a group of one, which never changes; what crosses ranks goes through the hook.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ddp = nn.parallel.DistributedDataParallel(
                self.module,
                process_group=ProcessGroupDummy(0, 1),
                init_sync=False,
                forward_sync_buffers=False,
                find_unused_parameters=True,
                gradient_as_bucket_view=True,
                bucket_cap_mb=self._bucket_cap_mb,
            )
        ddp.register_comm_hook(None, self._hook)
        self._ddp = [ddp]  # in a list: not a submodule, whose parameters would be named twice

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._ddp[0](*args, **kwargs)

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one slot; `last` is the rank's last slot, whose backward reduces."""
        self._manager.step.check()
        with contextlib.nullcontext() if last else self._ddp[0].no_sync():
            yield

    def _hook(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        self._reduced.append((bucket.parameters(), bucket.gradients()))
        return self._reduce(bucket.buffer())

    def _reduce(self, buffer: Tensor) -> Future[Tensor]:
        gang = self._manager.reduction(self._over)
        if isinstance(gang, ElasticGang):
            return gang.all_reduce_future(buffer)
        alone: Future[Tensor] = Future()
        alone.set_result(buffer)
        return alone

    def contribute(self) -> None:
        if self._reduced:
            return
        for bucket in self._ddp[0].reducer._get_zeros_like_grad_buckets():
            gradients = bucket.gradients()
            with torch.no_grad():
                for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
                    if parameter.grad is not None:
                        gradient.copy_(parameter.grad)
            self._reduced.append((bucket.parameters(), gradients))
            self._pending.append(self._reduce(bucket.buffer()))

    def finish(self) -> None:
        for future in self._pending:
            future.wait()
        for parameters, gradients in self._reduced:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        self._pending, self._reduced = [], []

    def drop(self, *, rebuild: bool) -> None:
        for future in self._pending:
            future.wait()
        self._pending, self._reduced = [], []
        for parameter in self.module.parameters():
            parameter.grad = None
        if rebuild:
            self._ddp.clear()
            self._build()

    def close(self) -> None:
        self._pending, self._reduced = [], []
        self._ddp.clear()  # its hook is what keeps this object and the module alive

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)
