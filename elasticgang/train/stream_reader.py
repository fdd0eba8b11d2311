"""Reads the samples of slots from splits: in the step itself, or in a worker process.

STREAMREADER-1  A split is read from the state that the request names. An open one in any other state is dropped, and
    the split is opened anew.
STREAMREADER-2  The states of all splits together fit into the manifest of a heal, and are exchanged in each step:
    `MAX_STATES_BYTES`, of which each split may have its share.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch.utils.data import default_collate

from elasticgang.state.serialization import as_bytes, flatten, unflatten
from elasticgang.state.transport import allocate, shapes_of
from elasticgang.train.data_worker import Collate, Fetcher, Request

MAX_STATES_BYTES = 32 << 20


class Reading(NamedTuple):
    """The samples of a slot: the next `num_samples` of split `number`. `most_open`: the splits that the reader may keep
    open. `max_state_bytes`: of the split's state as text."""

    number: int
    num_samples: int
    most_open: int
    max_state_bytes: int


class Split(Protocol):
    """A stream of samples, such as torchdata's `StatefulDataLoader`. `state_dict` is of the samples that its iterator
    has yielded. After `load_state_dict`, iterating yields the samples that follow; after the last one, iterating again
    yields the samples of the next pass."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class StreamFetcher(Fetcher):
    def __init__(self, open_split: Callable[[int], Split], collate: Collate | None) -> None:
        self._open_split, self._collate = open_split, collate or default_collate
        self._opened: dict[int, _OpenSplit] = {}  # the one that was read last at the end

    def worker_info(self, number: int, num_workers: int) -> tuple[int, int, Any]:
        """A split that divides its samples among the workers of torch's loader has all of them."""
        return 0, 1, self._open_split

    def read(self, request: Request) -> tuple[Any, str]:
        reading: Reading = request.samples
        split = self._opened.pop(reading.number, None)  # one that raises is not used again
        while len(self._opened) >= reading.most_open:
            del self._opened[next(iter(self._opened))]
        if split is None or split.state != request.start:  # STREAMREADER-1
            split = _OpenSplit(self._open_split(reading.number), request.start)
        batch = self._collate(split.read(reading.num_samples))
        state = split.save(reading.max_state_bytes)
        self._opened[reading.number] = split
        return batch, state


class _OpenSplit:
    """`state`: after the last read, as text; None at the beginning."""

    def __init__(self, split: Split, state: str | None) -> None:
        self.state = state
        if state is not None:
            split.load_state_dict(_from_text(state))
        self._split, self._samples = split, iter(split)

    def read(self, count: int) -> list[Any]:
        samples = list(itertools.islice(self._samples, count))
        while len(samples) < count:
            self._samples = iter(self._split)  # the next pass
            further = list(itertools.islice(self._samples, count - len(samples)))
            if not further:
                raise ValueError("the split has no samples")
            samples += further
        return samples

    def save(self, max_bytes: int) -> str:
        """The state as text. Raises ValueError: it is too large (STREAMREADER-2)."""
        try:
            self.state = state = _to_text(self._split.state_dict())
        except Exception as exc:
            raise ValueError(f"the `state_dict` of the split cannot be saved: {type(exc).__name__}: {exc}") from exc
        num_bytes = len(json.dumps(state))  # as in the manifest of a heal
        if num_bytes > max_bytes:
            raise ValueError(
                f"the `state_dict` of the split has {num_bytes:,} bytes as text, and may have {max_bytes:,}: the ranks "
                "exchange it in each step. Keep positions in it, not samples"
            )
        return state


def _to_text(state: object) -> str:
    """Raises TypeError: `state` has a value that is neither plain nor a tensor."""
    spec, tensors = flatten(state)
    data = [base64.b64encode(as_bytes(tensor)).decode() for tensor in tensors]
    return json.dumps([spec, shapes_of(tensors), data])


def _from_text(text: str) -> Any:
    spec, shapes, data = json.loads(text)
    tensors = allocate(shapes)
    for tensor, encoded in zip(tensors, data, strict=True):
        if tensor.numel():
            as_bytes(tensor)[:] = base64.b64decode(encoded)
    return unflatten(spec, tensors)
