"""Translates the calls of torch's process-group methods to checked `Collective`s.

Each function takes the arguments of the torch method of the same name, in all forms in which `torch.distributed` and
torch's C++ code call it. It returns the collectives to start, and sends nothing.

CALL-1  Arguments that do not match raise ValueError, which names both sides, before anything is sent. Arguments that no
    torch method accepts (an unknown keyword, a number as timeout) raise TypeError.
CALL-2  Tensors need not be contiguous. An output must not share memory among its elements or with another output. An
    input may share memory with an output.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.memory_overlap import check_distinct
from elasticgang.collectives.torch_arguments import (
    as_list,
    check_dense,
    check_fits,
    check_for_each_rank,
    check_options,
    check_rank,
    check_same_length,
    check_writable,
    moves_objects,
    operation_of,
    root_of,
    split_of,
)

_Form = TypeVar("_Form", bound=Callable[..., "Call"])


@dataclass(frozen=True)
class Call:
    """One call of a process group: `parts` are started in order; its future resolves to `result`.

    `is_exact`: only the true result is acceptable (objects and barriers), so that a poisoned group raises
    `StepAborted`. `source`: a tensor for the rank that sent the message, of a receive from any rank.
    """

    parts: tuple[Collective, ...]
    result: list[Any]
    is_exact: bool = False
    is_barrier: bool = False
    source: Tensor | None = None


FORMS: dict[str, Callable[..., Call]] = {}  # by torch's method name
_NAMES: dict[Callable[..., Call], dict[str, str]] = {}


def _form(*methods: str, **names: str) -> Callable[[_Form], _Form]:
    """Register the decorated function for torch's `methods`. `names`: names of torch's and torchft's parameters that
    differ from the function's own, and the own names. The function tells torch's overloads apart by argument type."""

    def register(form: _Form) -> _Form:
        FORMS.update(dict.fromkeys(methods, form))
        _NAMES[form] = names
        return form

    return register


def named(form: Callable[..., Call], keywords: dict[str, Any]) -> dict[str, Any]:
    """`keywords` under the parameter names of `form`. Raises TypeError: two of them name the same parameter."""
    names = _NAMES[form]
    found: dict[str, Any] = {}
    for given, value in keywords.items():
        name = names.get(given, given)
        if name in found:
            raise TypeError(f"{form.__name__}() got {given!r} together with another name for the same argument")
        found[name] = value
    return found


@_form("allreduce", "allreduce_coalesced", tensor="tensors", op="opts")
def allreduce(size: int, tensors: Sequence[Tensor] | Tensor, opts: Any = None, timeout: Any = None) -> Call:
    outputs = as_list(tensors)
    op = operation_of(opts)
    return Call(tuple(Collective("all_reduce", (t,), (t,), op) for t in check_writable(outputs)), outputs)


@_form("broadcast", tensor="tensors", root="opts", tensor_list="tensors")
def broadcast(size: int, tensors: Sequence[Tensor] | Tensor, opts: Any = None, timeout: Any = None) -> Call:
    outputs = as_list(tensors)
    root = root_of(opts, size)
    parts = tuple(Collective("broadcast", (t,), (t,), peer=root) for t in check_writable(outputs))
    return Call(parts, outputs, moves_objects(outputs))


@_form("reduce", tensor="tensors", root="opts")
def reduce(
    size: int, tensors: Sequence[Tensor] | Tensor, opts: Any = None, op: Any = None, timeout: Any = None
) -> Call:
    """Called as `reduce(tensors, options)` or `reduce(tensor, root, op)`."""
    outputs = as_list(tensors)
    root, operation = root_of(opts, size), operation_of(op if op is not None else getattr(opts, "reduceOp", None))
    return Call(tuple(Collective("reduce", (t,), (t,), operation, root) for t in check_writable(outputs)), outputs)


@_form("allgather", input_tensor="input_tensors")
def allgather(
    size: int,
    output_tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor],
    input_tensors: Sequence[Tensor] | Tensor,
    opts: Any = None,
    timeout: Any = None,
) -> Call:
    """One list of outputs for each input; or one list of outputs and one input tensor."""
    check_options(opts)
    inputs = as_list(input_tensors)
    lists: list[Any] = [output_tensors] if isinstance(input_tensors, Tensor) else list(output_tensors)
    check_same_length("output_tensors", lists, "input_tensors", inputs)
    parts = []
    for outputs, source in zip(lists, inputs, strict=True):
        check_for_each_rank("output_tensors", outputs, size)
        for output in check_writable(outputs):
            check_fits("an output tensor", output, source, source.numel())
        parts.append(Collective("all_gather", tuple(outputs), (source,)))
    return Call(tuple(parts), lists, moves_objects(inputs))


@_form("allgather_coalesced", input_list="inputs")
def allgather_coalesced(
    size: int, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
) -> Call:
    """One list of outputs for each rank, with one output for each input."""
    check_options(opts)
    if len(output_lists) != size or any(len(outputs) != len(inputs) for outputs in output_lists):
        raise ValueError(
            f"`output_lists` must be {size} lists (one a rank) of {len(inputs)} tensors (one an input), but are "
            f"{[len(outputs) for outputs in output_lists]} instead."
        )
    by_input = [[outputs[index] for outputs in output_lists] for index in range(len(inputs))]
    return replace(allgather(size, by_input, inputs), result=list(output_lists))


@_form("all_gather_single", "_allgather_base")
def all_gather_single(size: int, output: Tensor, input: Tensor, opts: Any = None, timeout: Any = None) -> Call:
    return all_gather_single_coalesced(size, [output], [input], opts)


@_form(
    "all_gather_single_coalesced", "allgather_into_tensor_coalesced", output_tensors="outputs", input_tensors="inputs"
)
def all_gather_single_coalesced(
    size: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
) -> Call:
    check_options(opts)
    check_same_length("outputs", outputs, "inputs", inputs)
    for output, source in zip(check_writable(outputs), inputs, strict=True):
        check_fits("`output`", output, source, size * source.numel())
    pairs = zip(outputs, inputs, strict=True)
    return Call(tuple(Collective("all_gather_single", (o,), (i,)) for o, i in pairs), list(outputs))


@_form("reduce_scatter", output="output_tensors", input="input_tensors", op="opts")
def reduce_scatter(
    size: int,
    output_tensors: Sequence[Tensor] | Tensor,
    input_tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor],
    opts: Any = None,
    timeout: Any = None,
) -> Call:
    """One list of inputs for each output; or one list of inputs and one output tensor. The inputs may differ in
    size."""
    outputs = as_list(output_tensors)
    lists: list[Any] = [input_tensors] if isinstance(output_tensors, Tensor) else list(input_tensors)
    check_same_length("output_tensors", outputs, "input_tensors", lists)
    op = operation_of(opts)
    parts = []
    for output, inputs in zip(check_writable(outputs), lists, strict=True):
        check_for_each_rank("input_tensors", inputs, size)
        for source in inputs:
            check_fits("an input tensor", source, output, source.numel())
        parts.append(Collective("reduce_scatter", (output,), tuple(inputs), op))
    return Call(tuple(parts), outputs)


@_form("reduce_scatter_single", "_reduce_scatter_base", outputTensor="output", inputTensor="input")
def reduce_scatter_single(size: int, output: Tensor, input: Tensor, opts: Any = None, timeout: Any = None) -> Call:
    return reduce_scatter_single_coalesced(size, [output], [input], opts)


@_form(
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    output_tensors="outputs",
    input_tensors="inputs",
)
def reduce_scatter_single_coalesced(
    size: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
) -> Call:
    check_same_length("outputs", outputs, "inputs", inputs)
    for output, source in zip(check_writable(outputs), inputs, strict=True):
        check_fits("`input`", source, output, size * output.numel())
    op = operation_of(opts)
    pairs = zip(outputs, inputs, strict=True)
    return Call(tuple(Collective("reduce_scatter_single", (o,), (i,), op) for o, i in pairs), list(outputs))


@_form("alltoall", output_tensors="outputs", input_tensors="inputs")
def alltoall(size: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Call:
    check_options(opts)
    check_for_each_rank("outputs", outputs, size)
    check_for_each_rank("inputs", inputs, size)
    for tensor in (*check_writable(outputs), *inputs):
        check_fits("a tensor", tensor, inputs[0], tensor.numel())
    return Call((Collective("all_to_all", tuple(outputs), tuple(inputs)),), list(outputs))


@_form("all_to_all_single", "alltoall_base", output_buffer="output", input_buffer="input")
def all_to_all_single(
    size: int,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    opts: Any = None,
    timeout: Any = None,
) -> Call:
    """Split sizes are along the first dimension; without them, all parts are equal."""
    check_options(opts)
    check_fits("`output`", output, input, output.numel())
    check_writable([output])
    outputs = split_of("output", output, output_split_sizes, size)
    inputs = split_of("input", input, input_split_sizes, size)
    return Call((Collective("all_to_all", outputs, inputs),), [output])


@_form("gather", input_tensor="input_tensors", root="opts")
def gather(
    size: int,
    output_tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor],
    input_tensors: Sequence[Tensor] | Tensor,
    opts: Any = None,
    timeout: Any = None,
) -> Call:
    """Only the root gives outputs; the other ranks give an empty list, or none."""
    inputs = as_list(input_tensors)
    lists: list[Any] = [output_tensors] if isinstance(input_tensors, Tensor) else list(output_tensors)
    root = root_of(opts, size)
    parts = []
    for index, source in enumerate(inputs):
        outputs = lists[index] if index < len(lists) else []
        if outputs:
            check_for_each_rank("output_tensors", outputs, size)
        for output in check_writable(outputs):
            check_fits("an output tensor", output, source, source.numel())
        parts.append(Collective("gather", tuple(outputs), (source,), peer=root))
    return Call(tuple(parts), lists, moves_objects(inputs))


@_form("scatter", output_tensor="output_tensors", root="opts")
def scatter(
    size: int,
    output_tensors: Sequence[Tensor] | Tensor,
    input_tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor],
    opts: Any = None,
    timeout: Any = None,
) -> Call:
    """Only the root gives inputs; the other ranks give an empty list, or none."""
    outputs = as_list(output_tensors)
    lists: list[Any] = [input_tensors] if isinstance(output_tensors, Tensor) else list(input_tensors)
    root = root_of(opts, size)
    parts = []
    for index, output in enumerate(check_writable(outputs)):
        inputs = lists[index] if index < len(lists) else []
        if inputs:
            check_for_each_rank("input_tensors", inputs, size)
        for source in inputs:
            check_fits("an input tensor", source, output, output.numel())
        parts.append(Collective("scatter", (output,), tuple(inputs), peer=root))
    return Call(tuple(parts), outputs, moves_objects(outputs))


@_form("send", dstRank="dst_rank")
def send(size: int, tensors: Sequence[Tensor], dst_rank: int, tag: int = 0) -> Call:
    peer, tag = check_rank("dst_rank", dst_rank, size), operator.index(tag)
    return Call(tuple(Collective("send", (), (check_dense(t),), peer=peer, tag=tag) for t in tensors), list(tensors))


@_form("recv", srcRank="src_rank")
def recv(size: int, tensors: Sequence[Tensor], src_rank: int, tag: int = 0) -> Call:
    peer, tag = check_rank("src_rank", src_rank, size), operator.index(tag)
    parts = tuple(Collective("recv", (t,), (), peer=peer, tag=tag) for t in check_writable(tensors))
    return Call(parts, list(tensors), moves_objects(list(tensors)))


@_form("recv_anysource")
def recv_anysource(size: int, tensors: Sequence[Tensor], tag: int = 0) -> Call:
    """One tensor, from the first rank that sends one under `tag`."""
    tensors = list(tensors)
    if len(tensors) != 1:
        raise ValueError(f"`tensors` must be one tensor, but are {len(tensors)} instead.")
    source = torch.full((1,), -1, dtype=torch.int64, device="cpu")
    part = Collective("recv_anysource", (*check_writable(tensors), source), tag=operator.index(tag))
    return Call((part,), tensors, is_exact=True, source=source)


def source_of(call: Call) -> int:
    """The rank that sent the message of a completed receive. Raises RuntimeError: `call` is not a receive."""
    if call.source is not None:
        return int(call.source)
    if not call.parts or call.parts[0].call != "recv":
        raise RuntimeError("the source rank is known of a `recv` only")
    return call.parts[0].peer


def monitored_barrier(wait_all_ranks: bool = False) -> Call:
    return Call((Collective("monitored_barrier", wait_all_ranks=bool(wait_all_ranks)),), [], is_exact=True)


@_form("barrier")
def barrier(size: int, opts: Any = None, timeout: Any = None) -> Call:
    check_options(opts)
    token = torch.zeros(1, device="cpu")
    return Call((Collective("all_reduce", (token,), (token,)),), [token], is_exact=True, is_barrier=True)


def barrier_on(call: Call, device: torch.device) -> Call:
    """The barrier `call` with its token on `device`, where the backend has no other tensors."""
    (part,) = call.parts
    token = torch.zeros(1, device=device)
    return replace(call, parts=(replace(part, outputs=(token,), inputs=(token,)),), result=[token])


def with_timeout(call: Call, arguments: Iterable[object]) -> Call:
    """`call` with the timeout among `arguments`: a timedelta, or one in an options object, where torch's default is
    negative."""
    for argument in arguments:
        timeout = argument if isinstance(argument, timedelta) else getattr(argument, "timeout", None)
        if isinstance(timeout, timedelta) and timeout > timedelta(0):
            parts = tuple(replace(part, timeout_s=timeout.total_seconds()) for part in call.parts)
            return replace(call, parts=parts)
    return call


def with_default_timeout(call: Call, timeout_s: float | None) -> Call:
    """`call` with the timeout `timeout_s` for the parts that have none."""
    if timeout_s is None:
        return call
    parts = tuple(replace(part, timeout_s=part.timeout_s or timeout_s) for part in call.parts)
    return replace(call, parts=parts)


def check_place(call: Call, rank: int) -> Call:
    """Check `call` for `rank`, and return it (CALL-1, CALL-2).

    Raises:
        ValueError: the root does not give the tensors that only the root gives, or another rank gives them; a message
            is for its sender; the part that a rank sends to itself has another size than the part that it receives
            from itself; the part that a rank keeps of a reduce-scatter has another size than its output; two outputs
            share memory.
    """
    check_distinct([output for part in call.parts for output in part.outputs])
    for part in call.parts:
        if part.call in ("send", "recv") and part.peer == rank:
            raise ValueError(f"the partner must be another rank than this one, but is {rank} instead.")
        if part.call in ("gather", "scatter"):
            given = part.outputs if part.call == "gather" else part.inputs
            if bool(given) != (rank == part.peer):
                wanted = "tensors of all ranks" if rank == part.peer else "no such tensors"
                raise ValueError(
                    f"`{part.call}` must be given {wanted} on rank {rank}, because the root is rank {part.peer}."
                )
        if part.call == "all_to_all":
            kept = part.outputs[rank].numel()
            check_fits("what a rank sends to itself", part.inputs[rank], part.outputs[rank], kept)
        if part.call == "reduce_scatter":
            kept = part.outputs[0].numel()
            check_fits("the input of a rank's own part", part.inputs[rank], part.outputs[0], kept)
    return call
