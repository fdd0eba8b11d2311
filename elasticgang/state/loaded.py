"""What a checkpoint that a rank has loaded says otherwise than its script.

LOADED-1  A parameter that a step has frozen is frozen by nothing in a job that resumes after that step, or in what
    `manager.build` makes for another layout, if the script freezes it in that step alone. So what was frozen in the
    state that is loaded is known, and what requires gradients in each of the next `_NUM_STEPS` steps is told. Not
    sooner: two networks may train in turns.
LOADED-2  A job that resumes has the settings of optimizers that were saved, as after torch's `load_state_dict`, also
    where the script is started with others. Those that it began with otherwise, and that no step has set when
    `_NUM_STEPS` have voted, to the same number or another, are told: they would be ignored without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from torch import Tensor

Settings: TypeAlias = Mapping[str, tuple[str, object]]  # by name: in words, and as they are

_NUM_STEPS = 3


class Loaded:
    """`frozen`: by module and name. `before`, `after`: the settings of the script, and those of the state."""

    def __init__(self, frozen: Iterable[tuple[str, str]], before: Settings, after: Settings) -> None:
        self._frozen = list(frozen)
        self._replaced = {
            what: (own, after[what]) for what, (own, _) in before.items() if what in after and after[what][0] != own
        }
        self._num_steps = 0

    def unlike(
        self, parameters: Mapping[str, Mapping[str, Tensor]], settings: Callable[[], Settings]
    ) -> tuple[list[str], list[str]]:
        """The names of the parameters of LOADED-1, and the settings of LOADED-2, once they are to be told. Call it once
        in each step of which this rank has a part, before the apply."""
        self._frozen = [
            (owner, key)
            for owner, key in self._frozen
            if (parameter := parameters.get(owner, {}).get(key)) is not None and parameter.requires_grad
        ]
        present = settings() if self._replaced else {}
        self._replaced = {
            what: (own, loaded)
            for what, (own, loaded) in self._replaced.items()
            if (found := present.get(what)) is not None and found[0] == loaded[0] and found[1] is loaded[1]
        }
        self._num_steps += 1
        if self._num_steps < _NUM_STEPS:
            return [], []
        frozen, replaced = self._frozen, self._replaced
        self._frozen, self._replaced = [], {}
        return (
            [f"{key!r} of {owner!r}" for owner, key in frozen],
            [f"{what} is {loaded} and not {own}" for what, (own, (loaded, _)) in replaced.items()],
        )
