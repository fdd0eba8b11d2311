"""DDP on two ranks with every communication hook of torch, over groups of the kinds that are named; prints the trained
parameters. Run by `test_hooks.py` under torchrun: `hook_ranks.py BACKEND KIND...`, where the kind "default" is the
default group of the backend."""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.nn.parallel import DistributedDataParallel

from elasticgang.comm.error_swallowing import SwallowingProcessGroup
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo

STEPS = 4
RATE = 0.1
TIMEOUT_S = 120.0


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 3))


def train(ddp: DistributedDataParallel, has_optimizer: bool = True) -> list[float]:
    """The parameters afterwards."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE) if has_optimizer else None
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs, targets = torch.randn(4, 24, generator=generator), torch.randn(4, 3, generator=generator)
        ddp.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(ddp(inputs), targets))
        if optimizer is not None:
            optimizer.step()
    return [parameter.double().sum().item() for parameter in ddp.parameters()]


def wrapped(pg: Any, module: nn.Module | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(module or model(), process_group=pg, bucket_cap_mb=0.004)  # several buckets


def of_type(name: str) -> Callable[[Any, Any], list[float]]:
    def run(pg: Any, sub: Any) -> list[float]:
        torch.manual_seed(2)
        ddp = wrapped(pg)
        register_ddp_comm_hook(DDPCommHookType[name], ddp, state=pg)
        return train(ddp)

    return run


def bf16_by_another_name(pg: Any, sub: Any) -> list[float]:
    """DDP refuses torch's hook, by its name, without NCCL."""

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.bf16_compress_hook(state, bucket)

    ddp = wrapped(pg)
    hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}  # DDP compares
    ddp.register_comm_hook(pg, hook)
    return train(ddp)


def power_sgd_from_the_start(pg: Any, sub: Any) -> list[float]:
    """`DDPCommHookType` begins to compress after 1,000 steps only, with plain reductions until then."""
    ddp = wrapped(pg)
    state = powerSGD_hook.PowerSGDState(pg, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(ddp)


def batched_power_sgd_from_the_start(pg: Any, sub: Any) -> list[float]:
    ddp = wrapped(pg)
    state = powerSGD_hook.PowerSGDState(pg, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    return train(ddp)


def fp16_wrapped_power_sgd(pg: Any, sub: Any) -> list[float]:
    ddp = wrapped(pg)
    state = powerSGD_hook.PowerSGDState(pg, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))
    return train(ddp)


def post_local_sgd(pg: Any, sub: Any) -> list[float]:
    ddp = wrapped(pg)
    state_of: Any = post_localSGD_hook.PostLocalSGDState  # it is untyped
    state = state_of(pg, sub, start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return train(ddp)


def optimizer_after_hook(pg: Any, sub: Any) -> list[float]:
    from torch.distributed.optim.functional_sgd import _FunctionalSGD  # warns

    module = model()
    ddp = wrapped(pg, module)
    optimizer = _FunctionalSGD(list(module.parameters()), lr=RATE, _allow_empty_param_list=True)
    state_of: Any = optimizer_overlap_hooks._OptimizerHookState  # it is untyped
    state = state_of(optimizer)
    ddp.register_comm_hook(pg, optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))
    return train(ddp, has_optimizer=False)


def optimizer_in_backward(pg: Any, sub: Any) -> list[float]:
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward  # warns

    module = model()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": RATE})
    return train(wrapped(pg, module), has_optimizer=False)


HOOKS: dict[str, Callable[[Any, Any], list[float]]] = {
    "no hook": lambda pg, sub: train(wrapped(pg)),
    **{kind.name: of_type(kind.name) for kind in DDPCommHookType},
    "bf16 by another name": bf16_by_another_name,
    "power SGD from the start": power_sgd_from_the_start,
    "batched power SGD from the start": batched_power_sgd_from_the_start,
    "fp16 and power SGD": fp16_wrapped_power_sgd,
    "post-local SGD": post_local_sgd,
    "optimizer after hook": optimizer_after_hook,
}
if torch.version.cuda is None or torch.cuda.is_available():  # a build for CUDA without it dies of a `torch.Stream`
    HOOKS["optimizer in backward"] = optimizer_in_backward


def groups(kind: str, store: str) -> Iterator[Any]:
    """One of all ranks, and one of this rank alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind == "default":
        yield dist.group.WORLD
        yield [dist.new_group([other]) for other in range(size)][rank]
        return
    for name, place in (("all", (rank, size)), (f"alone-{rank}", (0, 1))):
        pg: Any = ProcessGroupIsolatedGloo(TIMEOUT_S)
        if kind == "swallowing":
            pg = SwallowingProcessGroup(pg)
        pg.configure(f"{store}/hooks/{kind}/{name}", "replica", *place)
        yield pg


def main() -> None:
    warnings.simplefilter("ignore")
    backend, *kinds = sys.argv[1:]
    dist.init_process_group(backend)
    store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        pg, sub = groups(kind, store)
        found[kind] = {}
        for name, hook in HOOKS.items():
            try:
                found[kind][name] = hook(pg, sub)
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # refused, on all ranks alike
                found[kind][name] = f"refused: {type(error).__name__}: {error}"[:200]
        assert getattr(pg, "errored", lambda: None)() is None
        if kind != "default":
            pg.shutdown()
            sub.shutdown()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    gc.collect()  # a Gloo group that outlives the interpreter can end it by SIGABRT
    if rank == 0:
        print("RESULT", json.dumps(gathered))


if __name__ == "__main__":
    main()
