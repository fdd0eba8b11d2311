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
from torch.distributed import ReduceOp

from elasticgang.collectives.collective import Collective, ReduceOperation
from elasticgang.collectives.memory_overlap import check_distinct, overlaps_itself
from elasticgang.collectives.table import TORCH_OPERATIONS
from elasticgang.errors import NotSupportedError

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
    outputs = _as_list(tensors)
    op = _operation(opts)
    return Call(tuple(Collective("all_reduce", (t,), (t,), op) for t in _writable(outputs)), outputs)


@_form("broadcast", tensor="tensors", root="opts", tensor_list="tensors")
def broadcast(size: int, tensors: Sequence[Tensor] | Tensor, opts: Any = None, timeout: Any = None) -> Call:
    outputs = _as_list(tensors)
    root = _root(opts, size)
    parts = tuple(Collective("broadcast", (t,), (t,), peer=root) for t in _writable(outputs))
    return Call(parts, outputs, _moves_objects(outputs))


@_form("reduce", tensor="tensors", root="opts")
def reduce(
    size: int, tensors: Sequence[Tensor] | Tensor, opts: Any = None, op: Any = None, timeout: Any = None
) -> Call:
    """Called as `reduce(tensors, options)` or `reduce(tensor, root, op)`."""
    outputs = _as_list(tensors)
    root, operation = _root(opts, size), _operation(op if op is not None else getattr(opts, "reduceOp", None))
    return Call(tuple(Collective("reduce", (t,), (t,), operation, root) for t in _writable(outputs)), outputs)


@_form("allgather", input_tensor="input_tensors")
def allgather(
    size: int,
    output_tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor],
    input_tensors: Sequence[Tensor] | Tensor,
    opts: Any = None,
    timeout: Any = None,
) -> Call:
    """One list of outputs for each input; or one list of outputs and one input tensor."""
    _check_options(opts)
    inputs = _as_list(input_tensors)
    lists: list[Any] = [output_tensors] if isinstance(input_tensors, Tensor) else list(output_tensors)
    _same_length("output_tensors", lists, "input_tensors", inputs)
    parts = []
    for outputs, source in zip(lists, inputs, strict=True):
        _for_each_rank("output_tensors", outputs, size)
        for output in _writable(outputs):
            _fits("an output tensor", output, source, source.numel())
        parts.append(Collective("all_gather", tuple(outputs), (source,)))
    return Call(tuple(parts), lists, _moves_objects(inputs))


@_form("allgather_coalesced", input_list="inputs")
def allgather_coalesced(
    size: int, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
) -> Call:
    """One list of outputs for each rank, with one output for each input."""
    _check_options(opts)
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
    _check_options(opts)
    _same_length("outputs", outputs, "inputs", inputs)
    for output, source in zip(_writable(outputs), inputs, strict=True):
        _fits("`output`", output, source, size * source.numel())
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
    """One list of inputs for each output; or one list of inputs and one output tensor."""
    outputs = _as_list(output_tensors)
    lists: list[Any] = [input_tensors] if isinstance(output_tensors, Tensor) else list(input_tensors)
    _same_length("output_tensors", outputs, "input_tensors", lists)
    op = _operation(opts)
    parts = []
    for output, inputs in zip(_writable(outputs), lists, strict=True):
        _for_each_rank("input_tensors", inputs, size)
        for source in inputs:
            _fits("an input tensor", source, output, output.numel())
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
    _same_length("outputs", outputs, "inputs", inputs)
    for output, source in zip(_writable(outputs), inputs, strict=True):
        _fits("`input`", source, output, size * output.numel())
    op = _operation(opts)
    pairs = zip(outputs, inputs, strict=True)
    return Call(tuple(Collective("reduce_scatter_single", (o,), (i,), op) for o, i in pairs), list(outputs))


@_form("alltoall", output_tensors="outputs", input_tensors="inputs")
def alltoall(size: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Call:
    _check_options(opts)
    _for_each_rank("outputs", outputs, size)
    _for_each_rank("inputs", inputs, size)
    for tensor in (*_writable(outputs), *inputs):
        _fits("a tensor", tensor, inputs[0], tensor.numel())
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
    _check_options(opts)
    _fits("`output`", output, input, output.numel())
    _writable([output])
    outputs = _split("output", output, output_split_sizes, size)
    inputs = _split("input", input, input_split_sizes, size)
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
    inputs = _as_list(input_tensors)
    lists: list[Any] = [output_tensors] if isinstance(input_tensors, Tensor) else list(output_tensors)
    root = _root(opts, size)
    parts = []
    for index, source in enumerate(inputs):
        outputs = lists[index] if index < len(lists) else []
        if outputs:
            _for_each_rank("output_tensors", outputs, size)
        for output in _writable(outputs):
            _fits("an output tensor", output, source, source.numel())
        parts.append(Collective("gather", tuple(outputs), (source,), peer=root))
    return Call(tuple(parts), lists, _moves_objects(inputs))


@_form("scatter", output_tensor="output_tensors", root="opts")
def scatter(
    size: int,
    output_tensors: Sequence[Tensor] | Tensor,
    input_tensors: Sequence[Sequence[Tensor]] | Sequence[Tensor],
    opts: Any = None,
    timeout: Any = None,
) -> Call:
    """Only the root gives inputs; the other ranks give an empty list, or none."""
    outputs = _as_list(output_tensors)
    lists: list[Any] = [input_tensors] if isinstance(output_tensors, Tensor) else list(input_tensors)
    root = _root(opts, size)
    parts = []
    for index, output in enumerate(_writable(outputs)):
        inputs = lists[index] if index < len(lists) else []
        if inputs:
            _for_each_rank("input_tensors", inputs, size)
        for source in inputs:
            _fits("an input tensor", source, output, output.numel())
        parts.append(Collective("scatter", (output,), tuple(inputs), peer=root))
    return Call(tuple(parts), outputs, _moves_objects(outputs))


@_form("send", dstRank="dst_rank")
def send(size: int, tensors: Sequence[Tensor], dst_rank: int, tag: int = 0) -> Call:
    peer, tag = _rank("dst_rank", dst_rank, size), operator.index(tag)
    return Call(tuple(Collective("send", (), (_dense(t),), peer=peer, tag=tag) for t in tensors), list(tensors))


@_form("recv", srcRank="src_rank")
def recv(size: int, tensors: Sequence[Tensor], src_rank: int, tag: int = 0) -> Call:
    peer, tag = _rank("src_rank", src_rank, size), operator.index(tag)
    parts = tuple(Collective("recv", (t,), (), peer=peer, tag=tag) for t in _writable(tensors))
    return Call(parts, list(tensors), _moves_objects(list(tensors)))


@_form("recv_anysource")
def recv_anysource(size: int, tensors: Sequence[Tensor], tag: int = 0) -> Call:
    """One tensor, from the first rank that sends one under `tag`."""
    tensors = list(tensors)
    if len(tensors) != 1:
        raise ValueError(f"`tensors` must be one tensor, but are {len(tensors)} instead.")
    source = torch.full((1,), -1, dtype=torch.int64, device="cpu")
    part = Collective("recv_anysource", (*_writable(tensors), source), tag=operator.index(tag))
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
    _check_options(opts)
    token = torch.zeros(1)
    return Call((Collective("all_reduce", (token,), (token,)),), [token], is_exact=True, is_barrier=True)


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


def check_timeout(timeout: object) -> None:
    """Raises TypeError: `timeout` is neither a timedelta nor None."""
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"`timeout` must be a timedelta, but is {timeout!r} instead.")


def seconds(timeout: timedelta) -> float:
    """`timeout` in seconds. Raises TypeError: it is not a timedelta; or ValueError: it is not above 0."""
    check_timeout(timeout)
    if timeout <= timedelta(0):
        raise ValueError(f"`timeout` must be above 0 seconds, but is {timeout.total_seconds():g} instead.")
    return timeout.total_seconds()


def check_place(call: Call, rank: int) -> Call:
    """Check `call` for `rank`, and return it (CALL-1, CALL-2).

    Raises:
        ValueError: the root does not give the tensors that only the root gives, or another rank gives them; a message
            is for its sender; the part that a rank sends to itself has another size than the part that it receives
            from itself; two outputs share memory.
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
            _fits("what a rank sends to itself", part.inputs[rank], part.outputs[rank], kept)
    return call


def _as_list(tensors: Any) -> list[Any]:
    if not isinstance(tensors, Tensor | list | tuple):
        raise ValueError(f"tensors must be a tensor or a list of them, but are {_described(tensors)} instead.")
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _described(value: object) -> str:
    return f"{value!r} (of {type(value).__name__})"[:200]


def _operation(opts: Any) -> Any:
    """The operation of an options object or a `ReduceOp`; SUM for None."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return ReduceOperation.SUM
    for operation, known in TORCH_OPERATIONS.items():
        if op == known:
            return operation
    name, known_names = getattr(op, "op", op), ", ".join(known.name for known in TORCH_OPERATIONS.values())
    raise NotSupportedError(f"A reduction by {name} is not supported; use one of {known_names}.")


def _root(opts: Any, size: int) -> int:
    """The root of an options object, or a number; 0 for None."""
    root = getattr(opts, "rootRank", opts)
    if isinstance(root, ReduceOp | ReduceOp.RedOpType):  # it has `__index__` too
        raise TypeError(f"the root must be an integer, but is {root!r} instead.")
    return 0 if root is None else _rank("the root", root, size)


def _check_options(opts: Any) -> None:
    """Raises TypeError: `opts` of a call that takes only a timeout are neither options nor a timeout."""
    if opts is not None and not isinstance(opts, timedelta) and not hasattr(opts, "timeout"):
        raise TypeError(f"`opts` must be options or a timeout, but are {_described(opts)} instead.")


def _rank(name: str, rank: int, size: int) -> int:
    rank = operator.index(rank)
    if not 0 <= rank < size:
        raise ValueError(f"{name} must be at least 0 and less than the group's size ({size}), but is {rank} instead.")
    return rank


def _moves_objects(tensors: Sequence[Tensor]) -> bool:
    """Whether the call may belong to torch's object collectives, which move integers: sizes and pickled bytes."""
    return any(not (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors)


def _writable(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    for output in outputs:
        _dense(output)
        if overlaps_itself(output):
            raise ValueError(
                f"an output must not share memory among its elements, but has the shape {list(output.shape)} and the "
                f"strides {output.stride()}; use a copy of it."
            )
    return outputs


def _dense(tensor: Tensor) -> Tensor:
    given: object = tensor
    if not isinstance(given, Tensor):
        raise ValueError(f"a tensor is needed, but {_described(given)} was given.")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(
            f"a tensor must be dense (of layout torch.strided) and have data, but is of {tensor.layout} on "
            f"{tensor.device} instead."
        )
    return tensor


def _fits(name: str, tensor: Tensor, like: Tensor, num_elements: int) -> None:
    _dense(tensor)
    _dense(like)
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} must be of {like.dtype} on {like.device}, but is of {tensor.dtype} on {tensor.device}."
        )
    if tensor.numel() != num_elements:
        raise ValueError(f"{name} must have {num_elements} elements, but has {tensor.numel()} instead.")


def _same_length(name: str, tensors: Sequence[Any], other_name: str, others: Sequence[Any]) -> None:
    if len(tensors) != len(others):
        raise ValueError(f"`{name}` must be as many as `{other_name}` ({len(others)}), but are {len(tensors)} instead.")


def _for_each_rank(name: str, tensors: Sequence[Tensor], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"`{name}` must have one tensor for each of the {size} ranks, but has {len(tensors)} instead.")


def _split(name: str, tensor: Tensor, sizes: Sequence[int] | None, num_ranks: int) -> tuple[Tensor, ...]:
    length = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if length % num_ranks:
            raise ValueError(
                f"`{name}` must have a first dimension that divides by the group's size ({num_ranks}), but it is "
                f"{length} instead."
            )
        sizes = [length // num_ranks] * num_ranks
    if len(sizes) != num_ranks or sum(sizes) != length:
        raise ValueError(
            f"the split sizes of `{name}` must be {num_ranks} that sum to its first dimension ({length}), but are "
            f"{list(sizes)} instead."
        )
    return torch.split(tensor, list(sizes))
