"""How far the steps of a job have come in the data: state that every rank registers by itself.

Pure. The samples of one number and one seed are an order (`train/partition.py`), in which positions are counted.

POSITION-1  The samples of a step follow those of the step before that took some of the same order, whatever the sizes
    of both: a job that is resumed with another size goes on where the samples were.
POSITION-2  A job is not resumed with another number of samples of the same seed: their order is another one, in which
    the rest of the pass is not known. With another seed, the samples count as other data.
POSITION-3  A rank that heals in a step has asked for the global batches that the others took there, or it takes no
    samples in the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from elasticgang.errors import InvalidOperationError

NAME = "elasticgang.samples"  # of this state; no keyword argument of a script
MAX_ORDERS = 64


class BatchShape(NamedTuple):
    """What the samples of a global batch depend on. `is_sampled`: a function of the script chooses them."""

    num_samples: int
    size: int
    slot: int
    seed: int
    is_sampled: bool


class _Taken(NamedTuple):
    """What was last taken of an order: `size` samples from the position `first` on, in `step`."""

    step: int
    first: int
    size: int


class SamplePositions:
    """Of the last `MAX_ORDERS` orders. An object with `state_dict`, as `register_state` takes it."""

    def __init__(self) -> None:
        self._taken: dict[tuple[int, int], _Taken] = {}  # by order; the one of the last step at the end
        self._voted: tuple[int, dict[tuple[int, int], int]] | None = None  # the last step, and the sizes by order

    def vote(self, step: int, shapes: Iterable[BatchShape]) -> None:
        """This process votes on `step` with slots of `shapes`; also as a learner, which has none of them."""
        self._voted = step, {(each.num_samples, each.seed): each.size for each in shapes if not each.is_sampled}

    def take(self, step: int, shape: BatchShape) -> int:
        """The position of the first sample of `step`. The positions of the next step follow.

        Raises:
            ValueError: POSITION-2.
            InvalidOperationError: POSITION-3.
        """
        if shape.is_sampled:
            return step * shape.size
        self._check_healed(step)
        order = shape.num_samples, shape.seed
        taken = self._taken.pop(order, None)
        if taken is None:
            self._check_resumed(step, shape)
            first = step * shape.size
        else:
            first = taken.first if taken.step == step else taken.first + taken.size  # POSITION-1
        self._taken[order] = _Taken(step, first, shape.size)
        if len(self._taken) > MAX_ORDERS:
            del self._taken[next(iter(self._taken))]
        return first

    def _check_resumed(self, step: int, shape: BatchShape) -> None:
        """POSITION-2. Once this process has voted, it has not resumed the job in this step."""
        for (num_samples, seed), taken in self._taken.items():
            if seed == shape.seed and taken.step == step - 1 and self._voted is None:
                raise ValueError(
                    f"`num_samples` must be {num_samples}, as in the job that this one continues, but is "
                    f"{shape.num_samples} instead: the rest of the pass would be other samples. To go on with other "
                    "data, give `GlobalBatch` another `seed`."
                )

    def _check_healed(self, step: int) -> None:
        """POSITION-3."""
        if self._voted is None or self._voted[0] != step - 1 or any(each.step == step for each in self._taken.values()):
            return
        others = {order: each.size for order, each in self._taken.items() if each.step == step - 1}
        if others != self._voted[1]:
            raise InvalidOperationError(
                f"the other ranks took step {step - 1} from {_in_words(others)}, but this rank from "
                f"{_in_words(self._voted[1])}: make `GlobalBatch` alike on every rank, also on one that restarts."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"taken": [[*order, *taken] for order, taken in self._taken.items()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._taken = {
            (num_samples, seed): _Taken(*taken) for num_samples, seed, *taken in map(tuple, state_dict["taken"])
        }


def _in_words(sizes: Mapping[tuple[int, int], int]) -> str:
    return " and ".join(
        f"`GlobalBatch({num_samples}, size={size}, seed={seed})`" for (num_samples, seed), size in sizes.items()
    )
