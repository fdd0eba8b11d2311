"""When the gangs of a rank refuse to communicate.

BAN-1  After the vote of a step, and between steps, a collective is refused at its first call, whatever the number of
    ranks. A rank may die between the vote and the call: the others would get StepAborted in a step that is committed,
    and what follows the call would be missing on them, and only on them.
BAN-2  A ban holds for the thread that has set it, the training thread. Another thread of the script, such as one that
    writes a checkpoint, has its own collectives under way at any time, and its error leaves no step.
"""

from __future__ import annotations

import enum
import threading

from elasticgang.errors import InvalidOperationError

_WHERE_INSTEAD = (
    "Call it before `optim.step` in the same step, or at the beginning of the next step. An evaluation whose forward "
    "calls collectives goes there too. `optim.step(..., sums={...})` sums numbers over all ranks with the vote."
)
_WHY = "a rank may die between the vote and this call, and the others could then not agree on what follows it"


class Ban(enum.Enum):
    """What a rank does, or has done, so that its gangs do not communicate."""

    BUILD = (
        "while the training state is built: the others train meanwhile. Build with `init_sync=False` or "
        "`src_data_rank=None`; values come from the peers."
    )
    APPLY = (
        "while a step is applied: after a death there, the ranks of the gang would apply different values. Use an "
        "optimizer that updates each rank's part of a parameter by itself, as SGD and AdamW do; Muon and Adafactor do "
        "not for DTensors."
    )
    COMMITTED = f"after `optim.step`: the step is committed, {_WHY}. {_WHERE_INSTEAD}"
    DROPPED = f"after `optim.step`: the step is not committed, and is tried again. {_WHERE_INSTEAD}"
    NO_STEP = f"outside `with step:`: no step is open, {_WHY}. {_WHERE_INSTEAD}"


class Bans:
    """The ban in force, for all gangs of a rank and for those made from them."""

    def __init__(self) -> None:
        self._ban: Ban | None = None
        self._thread = 0

    def replace(self, ban: Ban | None) -> Ban | None:
        """Refuse all collectives that this thread starts; None: no longer. Returns the ban until now."""
        former, self._ban, self._thread = self._ban, ban, threading.get_ident()
        return former

    @property
    def _here(self) -> Ban | None:
        return self._ban if self._thread == threading.get_ident() else None  # BAN-2

    def check_work(self, gang: str, size: int) -> None:
        """Raises InvalidOperationError: this rank builds, or applies a step, so that the gang of that name and size
        must not communicate. In an apply, a gang of one has nobody to wait for."""
        ban = self._here
        if ban is Ban.BUILD or (ban is Ban.APPLY and size > 1):  # RULE-10
            raise InvalidOperationError(f"The gang {gang} cannot be used to communicate {ban.value}")

    def check_step(self, gang: str, call: str) -> None:
        """Raises InvalidOperationError: `call` cannot be started on the gang of that name, because the step has been
        voted on, or no step is open (BAN-1)."""
        ban = self._here
        if ban in (Ban.COMMITTED, Ban.DROPPED, Ban.NO_STEP):
            raise InvalidOperationError(f"`{call}` of the gang {gang} is refused {ban.value}")
