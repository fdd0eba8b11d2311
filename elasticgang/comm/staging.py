"""Staging: puts a tensor into shared memory for the comm process, in a shape and dtype that Gloo accepts.

STAGING-1  The caller's tensor keeps its address and strides, and its views stay valid. Its version changes only where a
    copy writes to it.
STAGING-2  A dtype that cannot be reduced is refused before anything is sent.
STAGING-3  A tensor on a device is copied through a block. Its collective begins once the caller's stream has drained,
    and ends once the result is on the device: it is never in a stream of another thread that the caller's might pass.
STAGING-4  Nothing is written to the tensor of a broadcast's root: autograd may have saved it, and notices a write.
STAGING-5  The copies are no operations of the caller's: its dispatch modes see none. Nothing is done for the tensors of
    a `FakeTensorMode`, which have no data.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from elasticgang.collectives.collective import writing
from elasticgang.comm.arena import Arena, Block
from elasticgang.comm.reentry import check_reentry, here
from elasticgang.comm.storage_mapping import MappedTensor, StorageMappings


@dataclass(eq=False)
class StagedTensor:
    """`tensor` in a block. `staged`: a copy in the block; None if the tensor's own memory is shared. `is_written`: the
    collective changes it, if it is an output."""

    tensor: Tensor
    block: Block
    staged: Tensor | None
    shared: MappedTensor | None
    described: tuple[int, int, torch.Size, str]
    is_written: bool = True

    def copy_in(self) -> None:
        if self.staged is not None:
            _copy(self.tensor, self.staged)
        elif self.shared is not None:
            for outside, inside in self.shared.edges:
                inside.copy_(outside)

    def copy_out(self) -> None:
        if not self.is_written:  # STAGING-4
            return
        if self.tensor.is_inference():
            with writing(self.tensor):  # STAGING-1
                self._copy_out()
        else:
            self._copy_out()

    def _copy_out(self) -> None:
        if self.staged is not None:
            _copy(self.staged, self.tensor)
            if self.tensor.is_cuda:  # STAGING-3
                torch.cuda.current_stream(self.tensor.device).synchronize()
        elif self.shared is not None:
            for outside, inside in self.shared.edges:
                outside.copy_(inside)

    def discard(self) -> None:
        """Zero a shared tensor after an error: the comm process may have written partial results to it."""
        if self.shared is not None:
            with writing(self.tensor):
                self.tensor.detach().zero_()


class Staging:
    """Puts tensors into the blocks of one arena. Thread-safe."""

    def __init__(self, arena: Arena) -> None:
        self._arena = weakref.proxy(arena)
        self._storages = StorageMappings(arena)

    @classmethod
    def of(cls, arena: Arena) -> Staging:
        """The staging of `arena`. All comm processes of a rank share it, like the arena."""
        with _made_lock:
            return _made.setdefault(arena, Staging(arena))

    def empty(self, num: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized vector of `num` elements, which is not copied if it is large and there is shared memory.

        Raises:
            InvalidOperationError: see `check_reentry`.
        """
        check_reentry()
        try:
            here.is_inside = True
            memory = self._storages.allocate(num * dtype.itemsize)
        finally:
            here.is_inside = False
        return torch.empty(num, dtype=dtype, device="cpu") if memory is None else memory.view(dtype)

    def stage(self, tensor: Tensor, dtype: torch.dtype) -> StagedTensor:
        """Take a block for `tensor` as `dtype`. `give_back` frees it."""
        if dtype == tensor.dtype and (shared := self._storages.find(tensor)) is not None:
            return StagedTensor(
                tensor, shared.block, None, shared, _described(shared.block, shared.offset, tensor.shape, dtype)
            )
        shape = torch.Size([*tensor.shape, 2]) if tensor.is_complex() and not dtype.is_complex else tensor.shape
        block = self._arena.take(shape.numel() * dtype.itemsize)
        return StagedTensor(tensor, block, block.as_tensor(shape, dtype), None, _described(block, 0, shape, dtype))

    def give_back(self, staged_tensor: StagedTensor) -> None:
        if staged_tensor.shared is None:
            self._arena.give_back(staged_tensor.block)


_made: weakref.WeakKeyDictionary[Arena, Staging] = weakref.WeakKeyDictionary()
_made_lock = threading.Lock()


def _described(block: Block, offset: int, shape: torch.Size, dtype: torch.dtype) -> tuple[int, int, torch.Size, str]:
    return block.slab.id, block.offset + offset, shape, DTYPE_NAMES[dtype]


def _copy(source: Tensor, target: Tensor) -> None:
    """Detached, which leaves autograd out and takes a fifth of the time that `no_grad` does."""
    source, target = source.detach(), target.detach()
    if source.is_complex() and not target.is_complex():
        source = torch.view_as_real(source.resolve_conj())
    elif target.is_complex() and not source.is_complex():
        source = torch.view_as_complex(source)
    target.copy_(source)


DTYPE_NAMES = {dtype: name for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}
