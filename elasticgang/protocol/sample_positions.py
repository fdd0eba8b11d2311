"""How far the steps of a job have come in the data: state that every rank registers by itself.

Pure. The samples of one number and one seed are an order (`train/partition.py`), in which positions are counted.

POSITION-1  The samples of a step follow those of the step before that took some of the same order, whatever the sizes
    of both: a job that is resumed with another size goes on where the samples were.
POSITION-2  A job is not resumed with another number of samples of the same seed: their order is another one, in which
    the rest of the pass is not known. With another seed, the samples count as other data.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
        self._resumed: int | None = None  # the first step after a checkpoint was loaded

    def resume(self, step: int) -> None:
        """The state was loaded from a checkpoint, with which `step` begins."""
        self._resumed = step

    def take(self, step: int, shape: BatchShape) -> int:
        """The position of the first sample of `step`. The positions of the next step follow.

        Raises:
            ValueError: POSITION-2.
        """
        if shape.is_sampled:
            return step * shape.size
        order = shape.num_samples, shape.seed
        taken = self._taken.pop(order, None)
        if taken is None:
            if step == self._resumed:
                self._check_resumed(step, shape)
            first = step * shape.size
        else:
            first = taken.first if taken.step == step else taken.first + taken.size  # POSITION-1
        self._taken[order] = _Taken(step, first, shape.size)
        if len(self._taken) > MAX_ORDERS:
            del self._taken[next(iter(self._taken))]
        return first

    def _check_resumed(self, step: int, shape: BatchShape) -> None:
        """POSITION-2."""
        for (num_samples, seed), taken in self._taken.items():
            if seed == shape.seed and taken.step == step - 1:
                raise ValueError(
                    f"`num_samples` must be {num_samples}, as in the job that this one continues, but is "
                    f"{shape.num_samples} instead: the rest of the pass would be other samples. To go on with other "
                    "data, give `GlobalBatch` another `seed`."
                )

    def state_dict(self) -> dict[str, Any]:
        return {"taken": [[*order, *taken] for order, taken in self._taken.items()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._taken = {
            (num_samples, seed): _Taken(*taken) for num_samples, seed, *taken in map(tuple, state_dict["taken"])
        }
