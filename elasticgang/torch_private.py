"""All private APIs of torch and torchft that the package calls.

Each was tried with torch 2.13.0 and 2.15.0, and torchft 0.2.0, but for those of GPUs: `new_nccl`, `share_cuda`,
`open_cuda` and `release_cuda` on one H100 with torch 2.13.0 alone, and `backend_failure` nowhere.

Private methods that the package overrides, because torch calls them (`_device_types`, `_build_params_for_reducer`), are
in the overriding classes.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions  # torch.distributed exports all others
from torch._guards import TracingContext as _TracingContext
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack

_any_c10d: Any = distributed_c10d  # most of it is untyped
_F = TypeVar("_F", bound=Callable[..., Any])

# -- torch's registry of process groups, in which gangs' groups are registered

world: Any = _any_c10d._world
register_in_world: Callable[..., None] = _any_c10d._register_pg_in_world
set_default_group: Callable[[Any], None] = _any_c10d._update_default_pg
unregister_group: Callable[[Any], None] = _c10d._unregister_process_group
is_outside: Callable[[Any], bool] = _any_c10d._rank_not_in_group


def new_group(ranks: Sequence[int], rank: int, backend: str, name: str, **options: Any) -> Any:
    """A group with the given name: `torch.distributed.new_group` generates names from the number of its calls. `ranks`:
    of the default group. `rank`: the rank of this process in the new group."""
    made, _ = _any_c10d._new_process_group_helper(
        len(ranks), rank, list(ranks), _any_c10d.Backend(backend), _any_c10d._get_default_store(), name, **options
    )
    world.pg_group_ranks[made] = {member: index for index, member in enumerate(ranks)}
    return made


def skip_flight_recorder(backend: str) -> None:
    """Let torch's flight recorder skip the groups of `backend`. torch 2.15 attaches it to every group that it makes,
    and raises for one that is written in Python."""
    getattr(_any_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(backend)


# -- process groups, backends and works


def device_types(pg: Any) -> list[str]:
    """The device types that a group of torch or torchft serves."""
    return [device.type for device in pg._device_types]


def source_rank(work: Any) -> int:
    """The rank that sent the message of a receive from any rank. torch's public name for it is deprecated."""
    return int(work._source_rank())


def coalescing_backend(pg: Any) -> Any:
    """The backend of a group, or a backend, that performs several messages at once; None if it does not."""
    group = wrapped_group(pg) or pg
    try:
        backend = group if isinstance(group, _c10d.Backend) else group._get_backend(torch.device("cuda"))
    except (AttributeError, RuntimeError):  # not a group of torch, or one without a backend for CUDA
        return None
    return backend if backend.supports_coalescing else None


def all_gather_single(pg: Any, output: Tensor, input: Tensor, options: Any) -> Any:
    """Backends have it only under its old name; groups have both names."""
    return pg._allgather_base(output, input, options)


def reduce_scatter_single(pg: Any, output: Tensor, input: Tensor, options: Any) -> Any:
    """See `all_gather_single`."""
    return pg._reduce_scatter_base(output, input, options)


def gloo_device(host: str | None, *, lazy: bool = False) -> Any:
    """A listening socket on the interface with the address `host` (None: Gloo chooses), and a thread. `lazy`: two ranks
    of its groups connect when they first exchange something, until when they need their store, which the caller must
    keep."""
    gloo: Any = _c10d.ProcessGroupGloo
    if host is None:
        return gloo.create_default_device(lazy_init=lazy)
    return gloo.create_device(hostname=host, lazy_init=lazy)


def gloo_keys(own: str, rank: int, peers: Sequence[int]) -> list[str]:
    """The names of the keys that `peers` put, by the name of the one that `rank` puts. Empty if it has another form."""
    begin, slash, last = own.rpartition("/")
    return [f"{begin}{slash}{peer}" for peer in peers] if slash and last == str(rank) else []


def new_gloo(store: Any, rank: int, size: int, timeout: timedelta, device: Any) -> Any:
    """Gloo's backend with its own timeout, on a `gloo_device`. The public constructor takes no interface."""
    gloo: Any = _c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [device]
    return gloo(store, rank, size, options)


def new_gloo_group(store: Any, rank: int, size: int, timeout: timedelta, host: str) -> Any:
    """torchft's group over Gloo, on the interface with the address `host`. torchft takes that of the host's name."""
    group = torch.distributed.ProcessGroup(store, rank, size)
    gloo: Any = torch.distributed.ProcessGroup.BackendType.GLOO
    group._set_default_backend(gloo)
    backend = new_gloo(store, rank, size, timeout, gloo_device(host))
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(kind), gloo, backend)
    return group


def new_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """NCCL's backend with its own timeout, outside a process group, which would also make the second call."""
    nccl: Any = getattr(_c10d, "ProcessGroupNCCL")  # noqa: B009  # not in every build
    options = nccl.Options()
    options._timeout = timeout
    group = nccl(store, rank, size, options)
    group._set_sequence_number_for_group()
    return group


# -- torchft


def wrapped_group(pg: Any) -> Any:
    """The group that a wrapper of torchft wraps, or that torchft's manager configures; None for other objects."""
    return getattr(pg, "_pg", None)


def baby_process(pg: Any) -> Any:
    """The subprocess of a `ProcessGroupBaby`, for a kill: `ProcessGroupBaby.abort` does nothing."""
    return getattr(pg, "_p", None)


def unreported_error(pg: Any) -> Exception | None:
    """Why a collective of a torchft group has failed, also if its `wait` has returned; None: none has. Waits for
    nothing: call it once the device has done the collectives.

    torch's watchdog sets the error of its backend before it aborts a communicator. The exception of a work does not
    tell: the watchdog sets that of a copy. torchft sets `_errored` before an abort, and its `errored` would wait for
    the current stream.
    """
    known = vars(pg)
    error: Exception | None = known["_errored"] if "_errored" in known else pg.errored()
    if error is not None:
        return error
    try:
        backend = wrapped_group(pg)._get_backend(torch.device("cuda"))
    except (AttributeError, RuntimeError):  # it wraps no group of torch, or one without a backend for CUDA
        return None
    failure = backend_failure(backend)
    return None if failure is None else RuntimeError(failure)


def backend_failure(backend: Any) -> str | None:
    """Why torch's watchdog has aborted the backend of a group; None: it has not."""
    if not hasattr(backend, "get_error") or (found := backend.get_error()) == _c10d.ErrorType.SUCCESS:
        return None
    return f"torch's watchdog has aborted the communicator ({found.name})"


# -- data loading


def close_result_writer(batches: Any) -> None:
    """Close this process's end for writing of the queue from which `batches`, an iterator of torch's `DataLoader`, gets
    them. A worker that dies in the middle of a batch then leaves an end of the queue, not a reader that waits for the
    rest. With `pin_memory` a thread of torch would read the queue, and torch wakes it through that end: `pinned` copies
    without one."""
    batches._worker_result_queue._writer.close()


def set_worker_info(number: int, num_workers: int, dataset: Any) -> None:
    """Let `torch.utils.data.get_worker_info` say this in a worker of torch's `DataLoader`, beside the seed that it has
    said until now."""
    from torch.utils.data._utils import worker

    of_worker: Any = worker
    seed = of_worker._worker_info.seed
    of_worker._worker_info = of_worker.WorkerInfo(id=number, num_workers=num_workers, seed=seed, dataset=dataset)


def pinned(batch: Any) -> Any:
    """A copy of `batch` with its tensors in pinned memory, as torch's `DataLoader` makes it with `pin_memory`. Without
    an accelerator: `batch`."""
    if not torch.accelerator.is_available():
        return batch
    from torch.utils.data._utils.pin_memory import pin_memory  # here: comm processes and agents need no loader

    return pin_memory(batch)  # type: ignore[no-untyped-call]


def replace_done_event(batches: Any) -> Any:
    """Give `batches`, an iterator of torch's `DataLoader`, an event of this process in place of the one that it shares
    with its workers. They take the shared one's lock for every batch, and one that is killed in that moment keeps it:
    torch would wait for it without end. Workers then learn of their end only by a signal, or by their parent's. Returns
    the shared one: keep it as long as the worker, which opens it by name if it was not forked."""
    shared, batches._workers_done_event = batches._workers_done_event, threading.Event()
    return shared


def shut_down_loader(batches: Any) -> None:
    """End `batches`, an iterator of torch's `DataLoader`, whose worker was killed. Its `__del__` comes too late where
    an exception refers to it."""
    batches._shutdown_workers()


def sends_descriptors() -> bool:
    """Whether torch sends memory of tensors between processes by descriptors, as it does by default."""
    return bool(torch.multiprocessing.get_sharing_strategy() == "file_descriptor")  # type: ignore[no-untyped-call]


def copy_on_write(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A private copy of `storage`, whose memory another process has sent by a descriptor (`is_shared`). The kernel
    copies a page when this process first writes to it."""
    descriptor, num_bytes = storage._share_fd_cpu_()  # the one that it has
    mapped: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", False, num_bytes)
    # Torch takes `mapped` for shared, and would send its descriptor, which it has not; the storage by DLPack is none.
    return from_dlpack(torch.empty(0, dtype=torch.uint8, device="cpu").set_(mapped)).untyped_storage()


# -- memory


def internal_overlap(tensor: Tensor) -> int:
    """Whether elements of `tensor` share memory: 0 no, 1 yes, 2 unknown."""
    return int(torch._debug_has_internal_overlap(tensor))


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of torch's storage object. It is not reused while a weak reference exists."""
    return int(storage._cdata)


def storage_of(key: int) -> torch.UntypedStorage | None:
    """The storage of a weak reference with the `cdata` `key`; None if it no longer exists."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(key)
    return storage


_CudaStorage: Any = torch.UntypedStorage


def share_cuda(storage: torch.UntypedStorage) -> list[Any]:
    """CUDA's IPC handle of device memory, as torch.multiprocessing sends it."""
    return list(_CudaStorage._share_cuda_(storage))


def open_cuda(handle: Sequence[Any]) -> torch.UntypedStorage:
    """Open a storage in another process, by the handle of `share_cuda`."""
    storage: torch.UntypedStorage = _CudaStorage._new_shared_cuda(*handle)
    return storage


def release_cuda(handle: Sequence[Any]) -> None:
    """Release the reference that a dead process had by `handle`."""
    _CudaStorage._release_ipc_counter_cuda(handle[4], handle[5])


# -- training


def shard(tensor: Any) -> Tensor:
    """The local part of a DTensor, without autograd, which `to_local` uses."""
    part: Tensor = tensor._local_tensor
    return part


def local_block(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape of a DTensor's shard on this rank, and where it starts in the whole tensor. None: the shard is not one
    block of it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    sizes, placements = tensor.device_mesh.shape, tensor.placements
    for dim, placed in enumerate(placements):
        if isinstance(placed, _StridedShard):
            # FSDP2 over tensor parallelism along the same dimension: a part of the rank's own shard of the latter.
            others = [at for at, other in enumerate(placements) if at != dim and other == Shard(placed.dim)]
            num_others = math.prod(sizes[at] for at in others)
            is_within = all(at > dim for at in others) and placed.split_factor == num_others
            if not is_within or tensor.shape[placed.dim] % (sizes[dim] * num_others):
                return None
        elif not isinstance(placed, Shard | Replicate):
            return None
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(start)


def own_buffers(module: Any) -> tuple[dict[str, Tensor | None], set[str]]:
    """The buffers of a module itself, and the names of those that are not persistent. The caller may change both: the
    public `register_buffer` cannot remove one."""
    return module._buffers, module._non_persistent_buffers_set


def holds_gradients(module: Any) -> bool:
    """Whether a `fully_shard` module holds gradients that it has not reduced, because its gradient sync is off."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)  # None: the module has not run
            if parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                return True
        if group._partial_reduce_output is not None:
            return True
    return False


def watch_exchanges(module: Any, name: str, seen: Callable[[str], None]) -> None:
    """Call `seen`, with words, when a `fully_shard` module of this name has gathered its parameters for a forward, and
    when it has reduced gradients."""

    def watch(group: Any) -> None:
        pre_forward, post_backward = group.pre_forward, group.post_backward

        def watched_pre_forward(*args: Any) -> Any:
            found = pre_forward(*args)
            seen(f"forward of {name}")
            return found

        def watched_post_backward(*args: Any) -> None:
            params = [each for each in group.fsdp_params if getattr(each, "_unsharded_param", None) is not None]
            adds_zeros = getattr(group, "reduce_scatter_unused_params", False)  # torch 2.13 has it
            left_out = [
                str(each._param_fqn)
                for each in params
                if each.unsharded_accumulated_grad is None
                and each.unsharded_param.grad is None
                and not (adds_zeros and each.unsharded_param.requires_grad)
            ]
            post_backward(*args)
            if len(left_out) < len(params) and group.reduce_grads:
                seen(f"gradients of {name}" + (f" without {', '.join(left_out)}" if left_out else ""))

        watched: Sequence[Any] = (watched_pre_forward, watched_post_backward)
        group.pre_forward, group.post_backward = watched
        for each in watched:
            run_untraced(each)

    for group in module._get_fsdp_state()._fsdp_param_groups:
        watch(group)


def init_dtypes_within(module: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let a `fully_shard` module find out within `context` in which dtype it reduces gradients. It does so in its first
    forward, from the parameters that require gradients then. If none does, it would later reduce gradients in the dtype
    in which backward computes them. If those within `context` have several dtypes, which it refuses, others count."""
    for group in module._get_fsdp_state()._fsdp_param_groups:

        def init(plain: Callable[[], None] = group._init_mp_dtypes) -> None:
            try:
                with context():
                    plain()
            except AssertionError:
                plain()

        group._init_mp_dtypes = init


def forget_iteration(module: Any) -> None:
    """Let a `fully_shard` module forget an iteration that was left: gradients that it has not reduced, and what it
    knows of the forward, such as the order of the modules, by which backward prefetches. torch's `reset_iter_state`
    takes only a root that has run. In 2.13 it leaves these gradients. In 2.15 it drops those of the shards too, which
    stay here: the step may be committed, and the optimizer has yet to use them."""
    module.reshard()
    state = module._get_fsdp_state()
    if state._is_root is None:  # the module has not run
        return
    for group in state._fsdp_param_groups:
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # in torch 2.15 it is the gradient below
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
    if state._is_root and hasattr(module, "reset_iter_state"):
        groups = [group for each in state._state_ctx.all_states for group in each._fsdp_param_groups]
        shards = [parameter.sharded_param for group in groups for parameter in group.fsdp_params]
        kept = [(shard, gradient) for shard in shards if (gradient := shard.grad) is not None]
        module.reset_iter_state()
        if kept and kept[0][0].grad is None:
            for each, gradient in kept:
                each.grad = gradient


def stored_values(tensor: Tensor) -> Tensor:
    """The stored elements of a sparse tensor. Unlike `values`, it accepts an uncoalesced one."""
    return tensor._values()


def like_dtensor(part: Tensor, tensor: Any) -> Tensor:
    """`part` as a DTensor with the mesh, placements, shape and strides of `tensor`, without communication."""
    made: Tensor = type(tensor)(part, tensor._spec, requires_grad=False)
    return made


def rebuild_buckets(reducer: Any) -> None:
    """Rebuild the buckets of DDP's reducer now. torch does it after the first backward."""
    reducer._push_all_rebuilt_params()
    reducer._rebuild_buckets()


def zeroed_buckets(reducer: Any) -> list[Any]:
    """The buckets of DDP's reducer, filled with zeros."""
    return list(reducer._get_zeros_like_grad_buckets())


class AllocatesVectors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which this thread's new vectors on the CPU come from `empty(num, dtype)`. DDP's reducer takes no
    memory for its buckets, but allocates them so."""

    def __init__(self, empty: Callable[[int, torch.dtype], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._empty = empty

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format and len(args[0]) == 1:
            device, dtype = options.get("device") or torch.device("cpu"), options.get("dtype")
            if device.type == "cpu" and dtype is not None:
                return self._empty(args[0][0], dtype)
        return func(*args, **options)


def has_scaled(scaler: Any) -> bool:
    """Whether an enabled `GradScaler` has multiplied anything by its scale. It makes a tensor of that then."""
    return bool(scaler.is_enabled()) and scaler._scale is not None


# one call for many small gradients
copy_all: Callable[..., None] = torch._foreach_copy_
add_all: Callable[..., None] = torch._foreach_add_
divide_all: Callable[..., None] = torch._foreach_div_
multiply_all: Callable[..., None] = torch._foreach_mul_


def forget_meshes() -> None:
    """Clear the caches of this thread in which DTensor keeps meshes. DTensor looks a mesh up by its ranks and names,
    and would continue to use the groups of an earlier one, and this rank's place in it."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute

    tensor_class: Any = DTensor
    tensor_class._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


# -- modes

has_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # the number of this thread's dispatch modes
without_modes: Callable[[], Any] = torch.utils._python_dispatch._disable_current_modes


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` is one without data, of a `FakeTensorMode`."""
    known = sys.modules.get("torch._subclasses.fake_tensor")
    return known is not None and isinstance(tensor, known.FakeTensor)


# -- torch.compile


def is_tracing() -> bool:
    """Whether this thread compiles code."""
    return _TracingContext.try_get() is not None


@functools.cache
def logging_file() -> str:
    """The source file of torch's logging."""
    file: str = torch._logging._internal.__file__
    return file


def run_untraced(function: types.FunctionType) -> None:
    """Let torch.compile run `function`, and the functions that it calls, without tracing them. `torch.compiler.disable`
    does the same, but imports torch._dynamo, which takes seconds, and wraps every call."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def outside_graphs(function: _F) -> _F:
    """A decorator: as `run_untraced`. Besides, torch.compile ends its graph before a call of `function`, which it would
    inline."""
    made: Any = function
    run_untraced(made)
    made._torchdynamo_disable = True  # what `torch.compiler.disable` sets
    return function
