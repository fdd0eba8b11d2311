"""How far the steps of a job have come in the data: state that every rank registers by itself.

Pure. The samples of one number and one seed are an order (`train/partition.py`), in which positions are counted.

POSITION-1  In a job that is resumed with another size, the samples of its first step follow those of the step before.
    Otherwise a position is of the step's index alone, so that it is known ahead.
POSITION-2  A job is not resumed with another number of samples of the same seed: their order is another one, in which
    the rest of the pass is not known. With another seed, the samples count as other data.
POSITION-3  A rank that heals in a step has asked for the global batches that the others took there, or it takes no
    samples in the next one: it differs from them (AGENT-12).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from elasticgang.errors import MismatchError

NAME = "elasticgang.samples"  # of this state; no keyword argument of a script
MAX_LINES = 64


class BatchShape(NamedTuple):
    """What the samples of a global batch depend on. `is_sampled`: a function of the script chooses them."""

    num_samples: int
    size: int
    slot: int
    seed: int
    is_sampled: bool


class _Line(NamedTuple):
    """Global batches that take `size` samples of one order in each step."""

    num_samples: int
    seed: int
    size: int

    @classmethod
    def of(cls, shape: BatchShape) -> _Line:
        return cls(shape.num_samples, shape.seed, shape.size)

    def __str__(self) -> str:
        return f"`GlobalBatch({self.num_samples}, size={self.size}, seed={self.seed})`"


class _Taken(NamedTuple):
    """The samples from the position `first` on, in `step`."""

    step: int
    first: int


class SamplePositions:
    """Of the last `MAX_LINES` kinds of global batches. An object with `state_dict`, as `register_state` takes it."""

    def __init__(self) -> None:
        self._taken: dict[_Line, _Taken] = {}  # what was last taken; the one of the last step at the end
        self._began: int | None = None  # the first step that this process has voted on
        self._voted: tuple[int, set[_Line]] | None = None  # the last one

    def vote(self, step: int, shapes: Iterable[BatchShape]) -> None:
        """This process votes on `step` with slots of `shapes`; also as a learner, which has none of them."""
        self._began = step if self._began is None else self._began
        self._voted = step, {_Line.of(each) for each in shapes if not each.is_sampled}

    def take(self, step: int, shape: BatchShape) -> int:
        """The position of the first sample of `step`. In the steps that follow, it is larger by `size` in each.

        Raises:
            ValueError: POSITION-2.
            MismatchError: POSITION-3.
        """
        if shape.is_sampled:
            return step * shape.size
        self._check_healed(step)
        line = _Line.of(shape)
        taken = self._taken.pop(line, None)
        first = self._begin(step, line) if taken is None else taken.first + (step - taken.step) * line.size
        self._taken[line] = _Taken(step, first)
        if len(self._taken) > MAX_LINES:
            del self._taken[next(iter(self._taken))]
        return first

    def _begin(self, step: int, line: _Line) -> int:
        """The first position of a kind of global batches that the job has not had. Raises ValueError: POSITION-2."""
        former = [each for each, taken in self._taken.items() if each.seed == line.seed and taken.step == step - 1]
        if self._began in (None, step) and former:  # this process has resumed the job
            return self._resume(line, former)
        return step * line.size

    def _resume(self, line: _Line, former: list[_Line]) -> int:
        for each in former:
            if each.num_samples == line.num_samples:  # POSITION-1
                return self._taken[each].first + each.size
        raise ValueError(
            f"`num_samples` must be {former[0].num_samples}, as in the job that this one continues, but is "
            f"{line.num_samples} instead: the rest of the pass would be other samples. To go on with other data, or to "
            "evaluate on such beside, give `GlobalBatch` another `seed`."
        )

    def _check_healed(self, step: int) -> None:
        """POSITION-3."""
        if self._voted is None or self._voted[0] != step - 1 or any(each.step == step for each in self._taken.values()):
            return
        others = {line for line, taken in self._taken.items() if taken.step == step - 1}
        if others and others != self._voted[1]:  # a rank that has not healed yet has none
            theirs, own = (" and ".join(map(str, sorted(lines))) for lines in (others, self._voted[1]))
            raise MismatchError(
                f"the other ranks took step {step - 1} from {theirs}, but this rank from {own}: make `GlobalBatch` "
                "alike on every rank, also on one that restarts."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"taken": [[*line, *taken] for line, taken in self._taken.items()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._taken = {_Line(*each[:3]): _Taken(*each[3:]) for each in state_dict["taken"]}
