"""The environment variables by which a process knows the job that it is part of.

What a rank starts inherits them: it is no more a job of its own than the rank is.
"""

from __future__ import annotations

import os

JOB_ID = "ELASTICGANG_JOB_ID"  # set by `elasticgang run` for its ranks
CHECKPOINT_DIR = "ELASTICGANG_CHECKPOINT_DIR"  # set by `elasticgang run --checkpoint-dir`
OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun's; no rank has them before its first step
JOIN = "call `manager = elasticgang.join()`, loop over `manager.steps(...)`, and use `manager.gangs`"


def checkpoint_dir() -> str | None:
    """The directory of durable checkpoints that the command line names; None for none."""
    return os.environ.get(CHECKPOINT_DIR)


def elastic_job() -> str | None:
    """The id of the elastic job that this process is a rank of, or was started by one of; None for none."""
    return os.environ.get(JOB_ID)
