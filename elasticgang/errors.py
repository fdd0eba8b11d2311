"""The whole error tree, by what the caller does next.

    ElasticGangError
      LayoutError (ValueError)        fix the configuration
        GridTooLargeError (RuntimeError)  a grid has more ranks than the world
      NotSupportedError               fairseq2's names for misuse: this object cannot do that,
      InvalidOperationError             not now,
        NoWorldError (RuntimeError)         before there is a default process group,
        ClosedError (OSError)             not any more: the process group was shut down,
      OperationalError                  the environment failed,
      InternalError                     a bug of ours
      GangError (RuntimeError)        drop the step, enter the next generation
        PeerLostError                   a peer, or the comm process, is gone
        CollectiveTimeoutError          nobody is known to be dead, but the deadline passed (TimeoutError)
        StaleGenerationError            the generation this belongs to has ended
        StepAborted                     object and barrier calls of a poisoned gang; `with step` catches it
      EvictedError                    exit; come back as a new member
      StateLostError                  no live holder and no checkpoint
      WireError                       bytes that are not ours, or half a message: close that connection

Some are also of Python's own kinds, which torch's and torchft's callers look for. Every error pickles, because errors
cross process boundaries here.
"""

from __future__ import annotations


class ElasticGangError(Exception):
    """The root of every error that elasticgang raises on purpose."""


class LayoutError(ElasticGangError, ValueError):
    """The declared layout cannot be met. Nothing was started."""


class GridTooLargeError(LayoutError, RuntimeError):
    """A grid has more ranks than the world. HyperCommGrid's callers look for a RuntimeError."""


class NotSupportedError(ElasticGangError):
    """The object cannot do this, now or later."""


class InvalidOperationError(ElasticGangError):
    """The call is not allowed in the object's present state."""


class OperationalError(ElasticGangError):
    """The environment failed: a process could not be started, a server could not be reached."""


class InternalError(ElasticGangError):
    """An invariant of elasticgang is broken. Please report it."""


class NoWorldError(InvalidOperationError, RuntimeError):
    """There is no default process group, and nothing else that says how many ranks there are. HyperCommGrid's callers
    look for a RuntimeError."""


class ClosedError(InvalidOperationError, OSError):
    """The process group was shut down."""


class GangError(ElasticGangError, RuntimeError):
    """A collective could not be completed. Its outputs are undefined; drop the step."""


class PeerLostError(GangError):
    """A member of the gang, or the comm process beside this rank, is gone."""


class CollectiveTimeoutError(GangError, TimeoutError):
    """A collective did not finish before its deadline."""


class StaleGenerationError(GangError):
    """The generation that this call belongs to has ended. Nothing was sent."""


class StepAborted(GangError):
    """The present step is lost. `with step` catches this and the step is tried again."""


class EvictedError(ElasticGangError):
    """This member is no longer part of the job; the process must exit and may come back as a new member."""


class StateLostError(ElasticGangError):
    """No live member holds the committed state and there is no checkpoint to go back to."""


class WireError(ElasticGangError):
    """What arrived is not one of our messages, or only half of one."""
