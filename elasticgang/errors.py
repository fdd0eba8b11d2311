"""The error tree, ordered by what the caller does next.

    ElasticGangError
      LayoutError (ValueError)        fix the configuration
        GridTooLargeError (RuntimeError)  a grid has more ranks than the world
      NotSupportedError               misuse: the object cannot do this (fairseq2's name)
      InvalidOperationError           misuse: the object cannot do this now (fairseq2's name)
        NoWorldError (RuntimeError)     there is no default process group yet
        MembershipError (RuntimeError)  the handles or the uuid of a reconfiguration are invalid
        ClosedError (OSError)           the process group was shut down
      OperationalError                the environment failed
        DeviceError                     raised by a script: its device is broken
        DamagedStateError               the states of replicas differ; this rank must not go on with its own
        UnhealedError                   this rank cannot get the training state, and the others have waited for it
      InternalError                   a bug in elasticgang
      GangError (RuntimeError)        drop the step, enter the next generation
        PeerLostError                   a peer, or the comm process, has died or left
        CollectiveTimeoutError          the deadline has passed, and no peer is known to be dead (TimeoutError)
        StaleGenerationError            the generation of the call has ended
        StepAborted                     object and barrier calls of a poisoned gang; `with step` catches it
      EvictedError                    exit; come back as a new member
      StateLostError                  no live holder and no checkpoint
      CheckpointError (ValueError)    a checkpoint is corrupt, or of another model or a newer format
      MismatchError                   this rank differs from the others: start it with the script that they run
      WireError                       invalid bytes or an incomplete message: close the connection

Some also inherit from Python's own errors, which callers of torch and torchft catch. Every error pickles, because
errors cross process boundaries.
"""

from __future__ import annotations


class ElasticGangError(Exception):
    """The root of every error that elasticgang raises on purpose."""


class LayoutError(ElasticGangError, ValueError):
    """The declared layout cannot be met. Nothing was started."""


class GridTooLargeError(LayoutError, RuntimeError):
    """A grid has more ranks than the world. Callers of HyperCommGrid catch a RuntimeError."""


class NotSupportedError(ElasticGangError):
    """The object cannot do this, now or later."""


class InvalidOperationError(ElasticGangError):
    """The call is not allowed in the object's present state."""


class OperationalError(ElasticGangError):
    """The environment failed: a process could not be started, a server could not be reached."""


class DeviceError(OperationalError):
    """This rank's device is broken. A script that finds this raises it: the agent restarts the rank, and after
    `--device-faults` of them in an hour on another device, or not at all. CUDA errors have the same effect without
    it."""


class DamagedStateError(OperationalError):
    """`--compare-state` has found that the training states of ranks with the same part of the model differ. `heals`:
    this rank's is damaged, and its successor heals from the others. Otherwise nobody can say which is right: every rank
    raises this, and the job ends. The state of each checkpoint was compared before it was saved, where more than one
    rank had it."""

    def __init__(self, message: str, *, heals: bool = False) -> None:
        super().__init__(message)
        self.heals = heals


class UnhealedError(OperationalError):
    """Nothing more of the training state has come from the ranks that hold it, for as long as the others wait for this
    rank. They go on without it. It is restarted as after a failure of the script."""


class InternalError(ElasticGangError):
    """An invariant of elasticgang is broken. Please report it."""


class NoWorldError(InvalidOperationError, RuntimeError):
    """There is no default process group, and nothing else determines the number of ranks. Callers of HyperCommGrid
    catch a RuntimeError."""


class MembershipError(InvalidOperationError, RuntimeError):
    """A process group cannot be reconfigured with these handles or this uuid. Nothing has changed. Callers of torch's
    reconfigurable groups catch a RuntimeError."""


class ClosedError(InvalidOperationError, OSError):
    """The process group was shut down."""


class GangError(ElasticGangError, RuntimeError):
    """A collective could not be completed. Its outputs are undefined; drop the step."""


class PeerLostError(GangError):
    """A member of the gang, or this rank's comm process, has died or left."""


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


class CheckpointError(ElasticGangError, ValueError):
    """A checkpoint cannot be used: it is corrupt, of another model, or of a newer format. Nothing was loaded."""


class MismatchError(ElasticGangError):
    """This rank makes other training state than the ranks that hold the job's, or sets other learning rates or the
    like, or takes other samples: its script, its arguments or its environment differ, or a schedule is not registered.
    Nothing that differs has gone into a step. The agent does not restart a rank that came to a running job, and the
    others go on."""


class WireError(ElasticGangError):
    """The received bytes are not a valid message, or only a part of one."""


def reason_of(error: OSError) -> str:
    """Why a call of the operating system failed, without the error's number and file."""
    return error.strerror or str(error)
