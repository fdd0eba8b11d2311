"""A gang whose rank, size and process group change from generation to generation beneath its users.

E1  The object keeps its identity; `bind` is called between generations only, by the manager's thread.
E2  The first error poisons every gang of the rank (the binding's owner does that); from then on until the next `bind`
    tensor collectives return at once with what their tensors hold, and object and barrier calls raise `StepAborted`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from elasticgang.errors import GangError, InvalidOperationError, StepAborted
from elasticgang.gang.base import Gang, ReduceOperation, check_collective, check_gathered, check_rank


class Work(Protocol):
    """A collective under way; `comm.client.CommWork` is one."""

    @property
    def future(self) -> torch.futures.Future[list[Tensor]]: ...

    def wait(self, timeout: float) -> None: ...


class Group(Protocol):
    """The process group of a gang in one generation. `poison` ends the generation for this rank."""

    @property
    def timeout(self) -> float: ...

    def submit(self, call: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: object) -> Work: ...

    def poison(self, error: GangError) -> None: ...


@dataclass(frozen=True)
class Binding:
    """`group` is None for a gang of one."""

    rank: int
    size: int
    group: Group | None


class ElasticGang(Gang):
    """A gang of the current generation, made by the manager."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._binding: Binding | None = None
        self._closed = False

    def bind(self, binding: Binding | None) -> None:
        self._binding = binding

    def __repr__(self) -> str:
        return f"ElasticGang({self._name!r}, {self._binding})"

    def _bound(self) -> Binding:
        if self._closed:
            raise InvalidOperationError(f"The gang {self._name} is closed.")
        if self._binding is None:
            raise InvalidOperationError(f"The gang {self._name} is in no generation; use it inside `with step:`.")
        return self._binding

    @property
    def rank(self) -> int:
        return self._bound().rank

    @property
    def size(self) -> int:
        return self._bound().size

    @property
    def device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        self._closed = True

    def all_reduce(self, tensor: Tensor, op: ReduceOperation) -> None:
        binding = self._bound()
        check_collective("tensor", tensor, self._device)
        if op is ReduceOperation.MEAN and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"`tensor` must be of a floating-point dtype for MEAN, but is of {tensor.dtype} instead.")
        call = ReduceOperation.SUM if op is ReduceOperation.MEAN else op
        if self._swallow(binding, "allreduce", [tensor], [tensor], op=call.value) and op is ReduceOperation.MEAN:
            with torch.no_grad():
                tensor.div_(binding.size)

    def all_reduce_future(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """SUM of `tensor` over all ranks, in place, as DDP's communication hooks want it: the future never fails.

        Of a poisoned gang it resolves at once to `tensor` as it is.
        """
        binding = self._bound()
        ended: torch.futures.Future[Tensor] = torch.futures.Future()
        if binding.group is None:
            ended.set_result(tensor)
            return ended
        work = binding.group.submit("allreduce", [tensor], [tensor], op=ReduceOperation.SUM.value)
        work.future.add_done_callback(lambda _: ended.set_result(tensor))
        return ended

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        check_collective("output_tensor", output_tensor, self._device)
        check_gathered("output_tensor", output_tensor, [self.size, *input_tensor.shape], input_tensor)
        self.all_gather_to_list(list(output_tensor.unbind()), input_tensor)

    def all_gather_to_list(self, output_tensors: list[Tensor], input_tensor: Tensor) -> None:
        binding = self._bound()
        if len(output_tensors) != binding.size:
            raise ValueError(
                f"`output_tensors` must have one tensor for each of the {binding.size} ranks, but has "
                f"{len(output_tensors)} instead."
            )
        check_collective("input_tensor", input_tensor, self._device)
        for index, output in enumerate(output_tensors):
            check_gathered(f"output_tensors[{index}]", output, input_tensor.shape, input_tensor)
        if binding.group is None:
            with torch.no_grad():
                output_tensors[0].copy_(input_tensor)
        elif not self._swallow(binding, "allgather", output_tensors, [input_tensor]):
            with torch.no_grad():
                for output in output_tensors:
                    output.zero_()

    def broadcast(self, tensor: Tensor, source_rank: int = 0) -> None:
        binding = self._bound()
        check_collective("tensor", tensor, self._device)
        check_rank("source_rank", source_rank, binding.size)
        self._swallow(binding, "broadcast", [tensor], [tensor], root=source_rank)

    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        binding = self._bound()
        check_rank("source_rank", source_rank, binding.size)
        if binding.group is None:
            return
        data = pickle.dumps(objects) if binding.rank == source_rank else b""
        size = torch.tensor([len(data)])
        self._perform(binding, "broadcast", [size], [size], root=source_rank)
        payload = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8)
        self._perform(binding, "broadcast", [payload], [payload], root=source_rank)
        received = pickle.loads(payload.numpy().tobytes())
        if len(received) != len(objects):
            raise ValueError(
                f"`objects` must have as many items as on rank {source_rank} ({len(received)}), but has "
                f"{len(objects)} instead."
            )
        objects[:] = received

    def barrier(self) -> None:
        binding = self._bound()
        token = torch.zeros(1)
        self._perform(binding, "allreduce", [token], [token], op=ReduceOperation.SUM.value)

    def _perform(
        self, binding: Binding, call: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: object
    ) -> None:
        """Run one collective; `StepAborted` when it cannot complete."""
        if not self._swallow(binding, call, outputs, inputs, **options):
            raise StepAborted(f"the generation ended before {call} of the gang {self._name} could complete")

    def _swallow(
        self, binding: Binding, call: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: object
    ) -> bool:
        """Run one collective. False, and the gangs of this rank poisoned, when it could not complete."""
        if binding.group is None:
            return True
        try:
            binding.group.submit(call, outputs, inputs, **options).wait(binding.group.timeout)
        except GangError as error:
            binding.group.poison(error)
            return False
        return True
