"""The environment variables by which a process knows the job that it is part of.

What a rank starts inherits them: it is no more a job of its own than the rank is.
"""

from __future__ import annotations

import os

JOB_ID = "ELASTICGANG_JOB_ID"  # set by `elasticgang run` for its ranks
OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun's; no rank has them before its first step
JOIN = "call `manager = elasticgang.join()`, loop over `manager.steps(...)`, and use `manager.gangs`"


def elastic_job() -> str | None:
    """The id of the elastic job that this process is a rank of, or was started by one of; None for none."""
    return os.environ.get(JOB_ID)
