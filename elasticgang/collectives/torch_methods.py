"""The collective methods of torch's `ProcessGroup`, implemented over one method, `_submit`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import copy as copied
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions
from torch._C._distributed_c10d import Work as TorchWorkBase
from torch.futures import Future

from elasticgang.collectives import torch_arguments, torch_calls
from elasticgang.collectives.collective import Collective
from elasticgang.collectives.group_backend import BackendQueries
from elasticgang.collectives.table import check_reduction, copy
from elasticgang.collectives.torch_calls import Call
from elasticgang.collectives.untraced import leave_untraced
from elasticgang.collectives.work import Outcome, TorchsWork, Work
from elasticgang.errors import InvalidOperationError, StepAborted
from elasticgang.torch_private import skip_flight_recorder, source_rank


class TorchWork(TorchWorkBase):
    """The work of one call of a process group. Its future resolves to the call's result once all parts have completed.

    On CUDA, `wait` orders the current stream after the parts, and the future orders the streams of its users.
    """

    def __init__(self, works: Sequence[Work], call: Call, owner: object = None) -> None:
        """`owner`: lives as long as the work. Futures refer to neither."""
        super().__init__()
        self._owner = owner
        self._works = works
        self._call = call
        self._parts: list[Future[bool]] | None = None  # the works' futures, once they are needed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises StepAborted: the result has to be exact, and the group was poisoned."""
        seconds = timeout.total_seconds() if timeout else None  # C++ callers pass 0 for none
        completed = [work.wait(seconds) for work in self._works]  # all of them, even if one did not complete
        _check(self._call, all(completed), [work.find_reason() for work in self._works])
        return True

    def get_future(self) -> Future[Any]:
        """C++ sees an error as an error. Python sees it as a RuntimeError that names it."""
        tensors = [tensor for part in self._call.parts for tensor in (*part.outputs, *part.inputs)]
        devices: set[Any] = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        if devices:
            return self._future_after(Future(devices=list(devices)))
        parts, call = self._futures(), self._call
        reasons = [work.find_reason() for work in self._works]

        def finish(_: Future[Any]) -> list[Any]:
            try:  # not the value of the combined future, which has no errors
                completed = all(part.value() for part in parts)
            except Exception as error:
                failure = copied(error.with_traceback(None))  # see `follow`: a raised error has this frame
            else:
                _check(call, completed, reasons)
                return call.result
            raise failure

        return torch.futures.collect_all(parts).then(finish)

    def _future_after(self, queued: Future[Any]) -> Future[Any]:
        """The future of works on a device. `queued`: a future of that device, completed when all parts are queued."""
        ended = TorchWork(self._works, self._call)

        def finish(_: Future[Any]) -> list[Any]:  # on a stream of torch, after which it orders its users' streams
            return ended.result()

        following: Future[Any] = queued.then(finish)
        torch.futures.collect_all(self._futures()).add_done_callback(lambda _: queued.set_result(None))
        return following

    def result(self) -> list[Any]:
        self.wait()
        return self._call.result

    def _source_rank(self) -> int:
        """The rank that sent the received message, after the completion of a receive.

        Raises:
            RuntimeError: the call is not a receive.
            StepAborted: the group was poisoned, and nothing was received.
        """
        reason = next((work.reason for work in self._works if work.reason), None)
        if reason is not None:
            raise StepAborted(f"nothing was received: {reason}")
        return torch_calls.source_of(self._call)

    source_rank = _source_rank

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        for work in self._works:
            if work.is_completed():
                try:
                    work.wait()
                except Exception as exc:
                    return exc
        return None

    def synchronize(self) -> None:
        self.wait()

    def _futures(self) -> list[Future[bool]]:
        if self._parts is None:
            self._parts = [work.get_future() for work in self._works]
        return self._parts


def adapted(
    work: Any, call: Call, owner: object = None, *, outcome: Outcome | None = None, waits_in_thread: bool = False
) -> TorchWork:
    """The `TorchWork` of `call` over `work`, a work of any process group. `outcome`: swallows its errors.
    `waits_in_thread`: see `TorchsWork`."""
    part, source = TorchsWork(work, waits_in_thread=waits_in_thread), call.source
    if source is not None:
        part.then(lambda: copy(torch.tensor([source_rank(work)], device="cpu"), source))
    if outcome is not None:
        part.swallowing(lambda: outcome)
    return TorchWork([part], call, owner)


def _check(call: Call, completed: bool, reasons: Sequence[Callable[[], str | None]]) -> None:
    if call.is_exact and not completed:
        why = next((reason for find in reasons if (reason := find())), "the generation has ended")
        raise StepAborted(f"a call whose result has to be exact was not completed: {why}")


def _collective(name: str, form: Callable[..., Call]) -> Callable[..., Any]:
    parameters = list(inspect.signature(form).parameters)[1:]  # without the size

    def method(self: CollectiveMethods, *args: Any, **kwargs: Any) -> Any:
        named = torch_calls.named(form, kwargs) if kwargs else kwargs
        torch_arguments.check_timeout({**dict(zip(parameters, args, strict=False)), **named}.get("timeout"))
        call = torch_calls.with_timeout(form(self._num_members(), *args, **named), (*args, *named.values()))
        call = torch_calls.check_place(call, self._place_among_members())
        for part in call.parts:  # all of them before any is sent
            self._check_dtype(part)
        return self._perform(name, call, args, kwargs)

    method.__name__ = name
    method.__doc__ = f"As `torch.distributed.ProcessGroup.{form.__name__}`. Raises ValueError before anything is sent."
    return method


class CollectiveMethods(BackendQueries):
    """A mixin with all collectives of a torch process group (`torch_calls.FORMS`), over `_submit`. Also keeps the
    group's name, which torch's own class keeps in a C++ backend."""

    _name = ""
    _desc = ""
    broadcast: Callable[..., Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        leave_untraced(cls)

    @property
    def group_name(self) -> str:
        """The group's name in torch's registry.

        Raises:
            InvalidOperationError: the group is not registered.
        """
        return self.getGroupName()

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:
        if not self._name:
            raise InvalidOperationError("The process group has no name; register it first.")
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def _register(self, name: str) -> str:
        """What torchft's `register` calls to make the group a backend of its own."""
        backend: str = super()._register(name)  # type: ignore[misc]  # groups of gangs are not torchft's
        skip_flight_recorder(backend.lower())
        return backend

    def rank(self) -> int:
        raise NotImplementedError

    def size(self) -> int:
        raise NotImplementedError

    def _num_members(self) -> int:
        """The number of ranks that take part in a collective. `size`, by which users divide, may be smaller."""
        return self.size()

    def _place_among_members(self) -> int:
        return self.rank()

    def _check_dtype(self, part: Collective) -> None:
        """Raises ValueError: the backend cannot reduce the dtype of `part`. On other devices than the CPU, the backend
        itself checks."""
        if part.outputs and part.outputs[0].device.type == "cpu":
            check_reduction(part)

    def _submit(self, call: Call) -> TorchWork:
        raise NotImplementedError

    def _perform(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform `call`, into which the method `name` has translated `args` and `kwargs`."""
        return self._submit(call)

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Any:
        """`broadcast` of one tensor."""
        options = BroadcastOptions()
        options.rootRank = root
        return self.broadcast([tensor], options)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As `torch.distributed.monitored_barrier` over Gloo: block until all ranks have reached the barrier. If a rank
        does not within `timeout` (None: the group's), rank 0 raises an error that names it; with `wait_all_ranks` it
        names all absent ranks. Otherwise the error has the effect of any error of the group."""
        torch_arguments.check_timeout(timeout)
        call = torch_calls.with_timeout(torch_calls.monitored_barrier(wait_all_ranks), [timeout])
        work = self._perform("monitored_barrier", call, (timeout, wait_all_ranks), {})
        if work is not None:  # torch's own group has waited already
            work.wait()


for _name, _form in torch_calls.FORMS.items():
    setattr(CollectiveMethods, _name, _collective(_name, _form))
leave_untraced(TorchWork)
leave_untraced(CollectiveMethods)
