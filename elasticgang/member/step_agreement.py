"""What the ranks of a step must have alike, compared by numbers that are summed with its totals: no message is added.

AGREEMENT-1  A number that stands for the global batches of the step. If ranks take samples of different ones, each of
    them finds that before it prepares, and raises an error. Learners add zeros: they take none.
AGREEMENT-2  A number that stands for the learning rates, unless stages of a pipeline may have others: a schedule that
    is not registered begins anew on a rank that restarts (ALIKE-2 sees it only in the first steps), and one that
    follows a rank's own loss goes its way.
AGREEMENT-3  Along `tp` and `pp` all ranks count the same samples, and the sum of the weights is divided by their
    number. So what the first one of each such group counts is summed too: a weight that the last stage alone gives
    would make all gradients larger by a factor. A rank that has reported an error may give any weight.
AGREEMENT-4  Likewise, a number that stands for what the ranks of an sdp gang have exchanged in the step, module by
    module. If they run different modules of the same size, or in another order, each gets a mixture of their
    parameters and gradients, without an error. So all ranks raise one, before any prepares.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Sequence

from elasticgang.errors import InvalidOperationError
from elasticgang.member.interfaces import Reducer
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.sample_positions import BatchShape
from elasticgang.protocol.shortened import shortened

NUM_NUMBERS = 8
_MAX_EXCHANGES = 40  # in a message
_WEIGHTS_TOLERANCE = 1e-6  # relative: a script may sum weights of its own in float32
_RATES_TOLERANCE = 1e-6  # relative: hosts may round the functions of a schedule differently


class StepAgreement:
    """One rank's part. `state`: of the rank. `reducers`: all of them; others may be added."""

    def __init__(self, state: MemberState, reducers: Sequence[Reducer]) -> None:
        self._state, self._reducers = state, reducers
        self._weight = 0.0
        self._taken: list[tuple[BatchShape, int]] = []
        self._rates: float | None = None
        self._exchanged: list[str] = []
        self._sent_batches, self._sent_rates = (0.0, 0.0), (0.0, 0.0)

    def begin(self, weight: float, taken: Collection[tuple[BatchShape, int]], rates: float) -> None:
        """The rank votes on a step. `weight`: what it counts. `taken`: the global batches, each with the position of
        its first sample. `rates`: stands for the learning rates."""
        self._weight, self._taken, self._rates = weight, sorted(taken), rates
        self._exchanged = [what for reducer in self._reducers for what in reducer.exchanged]

    def end(self) -> None:
        """What follows is of no step."""
        self._weight, self._taken, self._rates, self._exchanged = 0.0, [], None, []

    def numbers(self) -> tuple[float, ...]:
        """What this rank adds to the sums: as many as `NUM_NUMBERS`."""
        self._sent_batches, self._sent_rates = self._number_of_batches(), self._number_of_rates()
        return (*self._sent_batches, *self._sent_rates, *self._weights(), *self._exchanges())

    def check(self, sums: Sequence[float], *, has_error: bool) -> None:
        """`sums`: over all ranks, of `numbers`. `has_error`: a rank has reported one.

        Raises:
            InvalidOperationError: the ranks differ. All that have a part of it raise this, and none has voted.
        """
        self._check_batches(*sums[:2])
        self._check_rates(*sums[2:4])
        if not has_error:
            self._check_weights(*sums[4:6])
            self._check_exchanges(*sums[6:])

    def _number_of_batches(self) -> tuple[float, float]:
        """AGREEMENT-1: it, and 1; zeros if this rank has no samples."""
        if not (self._taken and self._state.is_active):
            return 0.0, 0.0
        return float(zlib.crc32(repr(self._taken).encode())), 1.0

    def _check_batches(self, total: float, num_ranks: float) -> None:
        """AGREEMENT-1."""
        own, is_one = self._sent_batches
        if is_one and total != own * num_ranks:
            what = " and ".join(
                f"samples from position {first} on of `GlobalBatch({shape.num_samples}, size={shape.size}, "
                f"slot={shape.slot}, seed={shape.seed})`"
                for shape, first in self._taken
            )
            raise InvalidOperationError(
                f"the ranks take step {self._state.committed.step} from different global batches. This rank has "
                f"{what}, and another one has not: make `GlobalBatch` alike on every rank, also on one that restarts."
            )

    def _number_of_rates(self) -> tuple[float, float]:
        """AGREEMENT-2: it, and 1; zeros if they may differ."""
        state = self._state
        is_counted = state.is_active and state.record is not None and state.record.layout.pp == 1
        return (self._rates, 1.0) if is_counted and self._rates is not None else (0.0, 0.0)

    def _check_rates(self, total: float, num_ranks: float) -> None:
        """AGREEMENT-2."""
        own, is_one = self._sent_rates
        if is_one and abs(total - own * num_ranks) > _RATES_TOLERANCE * abs(own * num_ranks):
            raise InvalidOperationError(
                f"the ranks have different learning rates in step {self._state.committed.step}: register the schedule "
                "(`register_state(schedule=schedule)`), and let it depend on nothing but the step and `optim.sums`"
            )

    def _weights(self) -> tuple[float, float]:
        """AGREEMENT-3: this rank's weight, and that of all that count the same samples if it is the first of them;
        zeros if each rank counts its own, or where one of its replica group has no state: that one counts nothing."""
        state = self._state
        if (record := state.record) is None or (num := record.layout.pp * record.layout.tp) == 1 or not state.share():
            return 0.0, 0.0
        pp, _, tp = record.model_coordinates(state.member)
        return self._weight, 0.0 if pp or tp else self._weight * num

    def _check_weights(self, of_all: float, of_first: float) -> None:
        """AGREEMENT-3."""
        if abs(of_all - of_first) > _WEIGHTS_TOLERANCE * of_all:
            raise InvalidOperationError(
                f"the weights of step {self._state.committed.step} differ between ranks that count the same samples: "
                "along `tp` and `pp`, let every rank give `optim.step` the same `weight`, also a stage that knows no "
                "loss"
            )

    def _exchanges(self) -> tuple[float, float]:
        """AGREEMENT-4: what stands for this rank's exchanges, and that of all ranks of its sdp gang if it is the first;
        zeros as of `_weights`."""
        state = self._state
        if (record := state.record) is None or (num := record.layout.sdp) == 1 or not state.share():
            return 0.0, 0.0
        own = float(zlib.crc32("\0".join(self._exchanged).encode()))
        return own, 0.0 if record.model_coordinates(state.member)[1] else own * num

    def _check_exchanges(self, of_all: float, of_first: float) -> None:
        """AGREEMENT-4."""
        if of_all != of_first:
            counted = [what + (f" ({num} times)" if num > 1 else "") for what, num in Counter(self._exchanged).items()]
            raise InvalidOperationError(
                f"ranks along `sdp` have run different modules of `fully_shard` in step {self._state.committed.step}, "
                "or in another order, and so have mixed their parameters or gradients: let all of them run the same "
                f"ones in each slot. This rank has run: {shortened(counted, _MAX_EXCHANGES) or 'none'}"
            )
