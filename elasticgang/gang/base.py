"""The Gang interface: a set of ranks that act collectively.

Names, argument order, shapes and in-place behaviour are those of fairseq2's `fairseq2.gang.Gang`. Additions are marked
"Beyond fairseq2".

GANG-1  Every call is checked here, once for all kinds of gang, before anything is sent. A `ValueError` names both
    sides.
GANG-2  `Gang` has fairseq2's abstract methods and no others. Its further methods are built on these (`composed.py`).
    The kinds of this package are `CheckedGang`s, which instead implement `_start` for a checked `Collective`.
GANG-3  A poisoned gang (an `ElasticGang` whose generation has ended) returns from tensor collectives at once, with
    finite, deterministic outputs. An in-place tensor keeps its values, or is zero if the comm process shares its memory
    and may have written to it. A pure output is zero. Object and barrier-like calls raise `StepAborted` instead,
    because they have no correct result.
GANG-4  Tensors may have any strides, also different ones on each rank: elements correspond by index, not by memory
    address. An output must not share memory among its elements.
GANG-5  torch.compile ends its graph before a collective of a real gang, and runs it without tracing it: it raises where
    it traces the methods of a process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from elasticgang.collectives.collective import Collective, ReduceOperation
from elasticgang.collectives.memory_overlap import check_distinct, overlaps_itself
from elasticgang.collectives.table import check_reduction, start_mean
from elasticgang.collectives.work import Work
from elasticgang.gang import composed
from elasticgang.integers import integer, integer_from


class Gang(ABC):
    """A set of ranks that act collectively; `rank` is this process's place in it, `0 <= rank < size`.

    Call every collective on all ranks of the gang, in the same order. It returns None once it has completed. With
    `async_op=True` it returns a `Work` at once; do not access its tensors before that work has completed.

    Your own subclass implements fairseq2's abstract methods, which need not take `async_op`. The other collectives are
    built on its `all_reduce`, `all_gather_to_list` and `broadcast`, and block. `send` and `recv` raise
    NotSupportedError.

    All collectives raise:
        ValueError: an argument is invalid. Nothing was sent, and the gang is still usable.
        InvalidOperationError: the gang is closed.
        GangError: a peer left, or the timeout passed. Outputs are undefined. (An `ElasticGang` is poisoned instead.)
    """

    description: str = ""
    """The purpose of the gang, and the `group_desc` of its process group. Beyond fairseq2."""

    is_fake: ClassVar[bool] = False
    """Whether the other ranks are simulated. Any other process group replaces a fake gang's as torch's default. Beyond
    fairseq2."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process in the gang, `0 <= rank < size`."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks of the gang."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the tensors of its collectives."""

    @property
    @abstractmethod
    def supports_process_group(self) -> bool:
        """Whether the gang has a process group (`as_process_group`)."""

    @property
    def is_poisoned(self) -> bool:
        """Whether tensor collectives return without a result (GANG-3): do not branch on their values. Always False for
        gangs other than an `ElasticGang`. Beyond fairseq2."""
        return False

    @abstractmethod
    def close(self) -> None:
        """End the gang. Later calls raise `InvalidOperationError`."""

    @abstractmethod
    def create_gang(self, ranks: Sequence[int]) -> Gang | None:
        """Make a gang of some of this gang's ranks; None on a rank that is not among them. Call it on every rank of
        this gang. As in torch's groups, the ranks are numbered in ascending order, whatever the order of `ranks`.

        Raises:
            ValueError: `ranks` is empty, has duplicates, or a rank outside `[0, size)`.
            GangError: the gang could not be made.
        """

    @abstractmethod
    def as_process_group(self) -> ProcessGroup:
        """The process group of this gang, for torch's functions. Raises NotSupportedError: the gang has none."""

    @abstractmethod
    def barrier(self) -> None:
        """Block until all ranks have called it. Raises StepAborted: the generation of an elastic gang has ended."""

    @abstractmethod
    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        """Replace the items of `objects` by those of rank `source_rank`. Uses pickle, so all ranks must be trusted.

        Raises:
            ValueError: `source_rank` is not a rank of this gang, or the lists differ in length; or that of the rank
                cannot be pickled, which raises pickle's error there. `objects` is unchanged, and the gang usable.
            StepAborted: the generation of an elastic gang has ended. `objects` is unchanged.
        """

    @overload
    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOperation, *, async_op: Literal[False] = False) -> None: ...

    @overload
    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOperation, *, async_op: bool) -> Work | None: ...

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOperation, *, async_op: bool = False) -> Work | None:
        """Reduce `tensor` over all ranks, in place on every one. Shape: `[*S]`, the same on every rank."""

    @abstractmethod
    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """Gather `input_tensor` of every rank, in rank order. Shapes: input `[*S]`, output `[size, *S]`, or
        `[size * n, *rest]` for an input `[n, *rest]`; the output is contiguous."""

    @abstractmethod
    def all_gather_to_list(
        self, output_tensors: list[Tensor], input_tensor: Tensor, *, async_op: bool = False
    ) -> Work | None:
        """Gather `input_tensor` of every rank, one tensor `[*S]` a rank."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source_rank: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy `tensor` of rank `source_rank` to `tensor` of every rank. Shape: `[*S]`, the same on every rank."""

    def reduce_scatter(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: ReduceOperation = ReduceOperation.SUM,
        *,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce over all ranks and keep this rank's part. Shapes: output `[*S]`, input `[size, *S]`, or
        `[size * n, *rest]` for an output `[n, *rest]`. Beyond fairseq2."""
        self._check_output("output_tensor", output_tensor)
        self._check_op(op)
        self._check_parts("input_tensor", input_tensor, output_tensor)
        return self._run(Collective("reduce_scatter_single", (output_tensor,), (input_tensor,), op), async_op)

    def all_to_all(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], *, async_op: bool = False
    ) -> Work | None:
        """Send `input_tensors[i]` to rank i and receive `output_tensors[i]` from it. Both lists have one tensor for
        each rank, all of one dtype. `input_tensors[j]` of rank i and `output_tensors[i]` of rank j have the same shape.
        Beyond fairseq2."""
        for name, tensors in (("output_tensors", output_tensors), ("input_tensors", input_tensors)):
            self._check_length(name, tensors)
            for index, tensor in enumerate(tensors):
                self._check(f"{name}[{index}]", tensor)
        for name, tensors in (("output_tensors", output_tensors), ("input_tensors", input_tensors)):
            for index, tensor in enumerate(tensors):
                self._check_dtype(f"{name}[{index}]", tensor, input_tensors[0])
        self._check_outputs("output_tensors", output_tensors)
        mine, kept = input_tensors[self.rank], output_tensors[self.rank]
        self._check_like(f"output_tensors[{self.rank}]", kept, mine.shape, mine)
        return self._run(Collective("all_to_all", tuple(output_tensors), tuple(input_tensors)), async_op)

    def reduce(
        self, tensor: Tensor, op: ReduceOperation, destination_rank: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Reduce `tensor` over all ranks into `tensor` of rank `destination_rank`. On the other ranks it is undefined
        afterwards. Shape: `[*S]`, the same on every rank. Beyond fairseq2."""
        self._check_output("tensor", tensor)
        root = self._check_rank("destination_rank", destination_rank)
        self._check_op(op)
        return self._run(Collective("reduce", (tensor,), (tensor,), op, root), async_op)

    def gather(
        self,
        output_tensors: list[Tensor] | None,
        input_tensor: Tensor,
        destination_rank: int = 0,
        *,
        async_op: bool = False,
    ) -> Work | None:
        """Gather `input_tensor` of every rank into `output_tensors` of rank `destination_rank`, which must be None on
        the other ranks. Shapes: `[*S]`, the same on every rank; `output_tensors` has one tensor for each rank. Beyond
        fairseq2."""
        self._check("input_tensor", input_tensor)
        root = self._check_rank("destination_rank", destination_rank)
        outputs = self._at_root("output_tensors", output_tensors, root)
        if self.rank == root:
            self._check_list("output_tensors", outputs, input_tensor)
            self._check_outputs("output_tensors", outputs)
        return self._run(Collective("gather", tuple(outputs), (input_tensor,), peer=root), async_op)

    def scatter(
        self,
        output_tensor: Tensor,
        input_tensors: list[Tensor] | None,
        source_rank: int = 0,
        *,
        async_op: bool = False,
    ) -> Work | None:
        """Copy to each rank's `output_tensor` its own one of the `input_tensors` of rank `source_rank`, which must be
        None on the other ranks. Shapes: `[*S]`, the same on every rank; `input_tensors` has one tensor for each rank.
        Beyond fairseq2."""
        self._check_output("output_tensor", output_tensor)
        root = self._check_rank("source_rank", source_rank)
        inputs = self._at_root("input_tensors", input_tensors, root)
        if self.rank == root:
            self._check_list("input_tensors", inputs, output_tensor)
        return self._run(Collective("scatter", (output_tensor,), tuple(inputs), peer=root), async_op)

    def send(self, tensor: Tensor, destination_rank: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Send `tensor` to one rank, which must `recv` it under the same `tag`. Shape and dtype are the same on both.
        Beyond fairseq2.

        Raises:
            NotSupportedError: the gang is a subclass of your own, with fairseq2's methods only.
        """
        self._check("tensor", tensor)
        peer, tag = self._check_partner("destination_rank", destination_rank, tag)
        return self._run(Collective("send", (), (tensor,), peer=peer, tag=tag), async_op)

    def recv(self, tensor: Tensor, source_rank: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Receive `tensor` from one rank, which must `send` it under the same `tag`. Shape and dtype are the same on
        both. Beyond fairseq2.

        Raises:
            NotSupportedError: the gang is a subclass of your own, with fairseq2's methods only.
        """
        self._check_output("tensor", tensor)
        peer, tag = self._check_partner("source_rank", source_rank, tag)
        return self._run(Collective("recv", (tensor,), (), peer=peer, tag=tag), async_op)

    def _run(self, collective: Collective, async_op: bool) -> Work | None:
        if self.device.type == "cpu":  # on other devices, the backend checks
            check_reduction(collective)
        work = self.start(collective)
        if async_op:
            return work
        work.wait()
        return None

    def start(self, collective: Collective) -> Work:
        """Start a collective whose ranks, shapes and dtypes were checked."""
        if collective.op is not ReduceOperation.MEAN:
            return self._start(collective)
        return start_mean(self._start, collective, self.size)

    def _start(self, collective: Collective) -> Work:
        """Start a checked collective whose operation is not MEAN."""
        composed.perform(self, collective)
        return Work()

    def _check(self, name: str, tensor: Tensor) -> None:
        """GANG-1."""
        if not isinstance(tensor, Tensor):
            raise ValueError(f"`{name}` must be a tensor, but is of {type(tensor).__name__} instead.")
        ours, its = self.device, tensor.device
        # A device without an index is any device of its type. A tensor's device has an index on CUDA and none on the
        # CPU.
        if its != ours and (its.type != ours.type or None not in (its.index, ours.index)):
            raise ValueError(f"`{name}` must be on the gang's device ({ours}), but is on {its} instead.")
        if tensor.layout is not torch.strided:
            raise ValueError(f"`{name}` must be dense (of layout torch.strided), but is of {tensor.layout} instead.")
        if tensor.is_conj() or tensor.is_neg():
            solution = "resolve_conj" if tensor.is_conj() else "resolve_neg"
            raise ValueError(f"`{name}` must not be a conjugate or negative view; use `{name}.{solution}()`.")

    def _check_output(self, name: str, tensor: Tensor) -> None:
        """Check a tensor that is written (GANG-4)."""
        self._check(name, tensor)
        self._check_outputs(name, [tensor])

    def _check_outputs(self, name: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if overlaps_itself(tensor):
                raise ValueError(
                    f"`{name}` must not share memory among its elements, but has the shape {list(tensor.shape)} and "
                    f"the strides {tensor.stride()}; use a copy of it."
                )
        check_distinct(tensors)

    def _check_dtype(self, name: str, tensor: Tensor, like: Tensor) -> None:
        if tensor.dtype != like.dtype:
            raise ValueError(f"`{name}` must be of the same dtype ({like.dtype}), but is of {tensor.dtype} instead.")

    def _check_like(self, name: str, tensor: Tensor, shape: Sequence[int], like: Tensor) -> None:
        self._check(name, tensor)
        if list(tensor.shape) != list(shape):
            raise ValueError(f"`{name}` must have the shape {list(shape)}, but has {list(tensor.shape)} instead.")
        self._check_dtype(name, tensor, like)

    def _check_parts(self, name: str, tensor: Tensor, part: Tensor) -> None:
        """Check that `tensor` has one part for each rank, stacked or joined along the first dimension."""
        stacked = [self.size, *part.shape]
        joined = [self.size * part.shape[0], *part.shape[1:]] if part.dim() else stacked
        self._check(name, tensor)
        if list(tensor.shape) not in (stacked, joined):
            hint = f" The parts may also lie one after another, in the shape {joined}." if part.dim() else ""
            raise ValueError(f"`{name}` must have the shape {stacked}, but has {list(tensor.shape)} instead.{hint}")
        self._check_dtype(name, tensor, part)

    def _check_length(self, name: str, tensors: Sequence[Tensor]) -> None:
        given: object = tensors
        if not isinstance(given, Sequence):
            raise ValueError(f"`{name}` must be a list of tensors, but is of {type(given).__name__} instead.")
        if len(tensors) != self.size:
            raise ValueError(
                f"`{name}` must have one tensor for each of the {self.size} ranks, but has {len(tensors)} instead."
            )

    def _check_list(self, name: str, tensors: Sequence[Tensor], like: Tensor) -> None:
        self._check_length(name, tensors)
        for index, tensor in enumerate(tensors):
            self._check_like(f"{name}[{index}]", tensor, like.shape, like)

    def _check_rank(self, name: str, rank: int) -> int:
        """`rank` as a Python int: other integer types cannot be sent to another process."""
        number = integer(rank)
        if number is None or not 0 <= number < self.size:
            raise ValueError(
                f"`{name}` must be an integer of at least 0 and less than the gang's size ({self.size}), but is "
                f"{rank!r} instead."
            )
        return number

    def _check_op(self, op: ReduceOperation) -> None:
        if not isinstance(op, ReduceOperation):
            raise ValueError(
                f"`op` must be a ReduceOperation ({', '.join(ReduceOperation.__members__)}), but is {op!r}."
            )

    def _check_partner(self, name: str, rank: int, tag: int) -> tuple[int, int]:
        peer, number = self._check_rank(name, rank), integer_from(0, tag)
        if number is None:
            raise ValueError(f"`tag` must be an integer of at least 0, but is {tag!r} instead.")
        if peer == self.rank:
            raise ValueError(f"`{name}` must be another rank than this one ({self.rank}), but is {rank} instead.")
        return peer, number

    def _at_root(self, name: str, tensors: list[Tensor] | None, root: int) -> list[Tensor]:
        if (tensors is not None) != (self.rank == root):
            wanted = "a list of tensors" if self.rank == root else "None"
            raise ValueError(f"`{name}` must be {wanted} on rank {self.rank}, because the root is rank {root}.")
        return [] if tensors is None else tensors


class CheckedGang(Gang):
    """A gang whose collectives are checked here and started by `_start`."""

    def await_device(self) -> None:
        """Block until the device has done what the current stream has queued, where the gang's collectives are queued
        on one. The gang is poisoned then if a collective has failed there."""

    @overload
    def all_reduce(self, tensor: Tensor, op: ReduceOperation, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def all_reduce(self, tensor: Tensor, op: ReduceOperation, *, async_op: bool) -> Work | None: ...

    def all_reduce(self, tensor: Tensor, op: ReduceOperation, *, async_op: bool = False) -> Work | None:
        """See `Gang.all_reduce`."""
        self._check_output("tensor", tensor)
        self._check_op(op)
        return self._run(Collective("all_reduce", (tensor,), (tensor,), op), async_op)

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """See `Gang.all_gather`."""
        self._check("input_tensor", input_tensor)
        self._check_parts("output_tensor", output_tensor, input_tensor)
        if not output_tensor.is_contiguous():
            raise ValueError(
                f"`output_tensor` must be contiguous, but has the strides {output_tensor.stride()} instead."
            )
        return self._run(Collective("all_gather_single", (output_tensor,), (input_tensor,)), async_op)

    def all_gather_to_list(
        self, output_tensors: list[Tensor], input_tensor: Tensor, *, async_op: bool = False
    ) -> Work | None:
        """See `Gang.all_gather_to_list`."""
        self._check("input_tensor", input_tensor)
        self._check_list("output_tensors", output_tensors, input_tensor)
        self._check_outputs("output_tensors", output_tensors)
        return self._run(Collective("all_gather", tuple(output_tensors), (input_tensor,)), async_op)

    def broadcast(self, tensor: Tensor, source_rank: int = 0, *, async_op: bool = False) -> Work | None:
        """See `Gang.broadcast`."""
        self._check_output("tensor", tensor)
        root = self._check_rank("source_rank", source_rank)
        return self._run(Collective("broadcast", (tensor,), (tensor,), peer=root), async_op)

    @abstractmethod
    def _start(self, collective: Collective) -> Work:
        """Start a checked collective (GANG-2)."""


def check_objects(objects: list[object]) -> None:
    """Raises ValueError: `objects` is not a list, whose items can be replaced."""
    if not isinstance(objects, list):
        raise ValueError(f"`objects` must be a list, but is a {type(objects).__name__} instead.")


def create_one_of(parent: Gang, groups: Sequence[Sequence[int]], description: str) -> Gang | None:
    """Make one gang for each of `groups`, disjoint sets of ranks of `parent`, and return this rank's; None if the rank
    is in none. `description`: of the gangs. Call it on every rank of `parent`."""
    made = [parent.create_gang(group) for group in groups]
    gang = next((gang for gang in made if gang is not None), None)
    if gang is not None:
        gang.description = description
    return gang
