"""The environment variables that tell a process its job. Child processes of a rank inherit them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

JOB_ID = "ELASTICGANG_JOB_ID"  # `elasticgang run` sets it for its ranks
CHECKPOINT_DIR = "ELASTICGANG_CHECKPOINT_DIR"  # `elasticgang run --checkpoint-dir` sets it
HEAL_INTERFACES = "ELASTICGANG_HEAL_INTERFACES"  # `elasticgang run --heal-interfaces` sets it
LAYOUT = "ELASTICGANG_LAYOUT"  # `elasticgang run --layout` sets it
DEVICE = "ELASTICGANG_DEVICE"  # `elasticgang run` sets it for its ranks: the index of the rank's CUDA device
ASK_SIZE = "ELASTICGANG_ASK_SIZE"  # tests set it: see `ask_size`
RUN_DIR = "ELASTICGANG_RUN_DIR"  # where the jobs of this user on this host are listed
OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun's; a rank has them from its first step on
JOIN = "call `manager = elasticgang.join()`, loop over `manager.steps(...)`, and use `manager.gangs`"


def checkpoint_dir() -> str | None:
    """The directory or URL of durable checkpoints that the command line names; None for none."""
    return os.environ.get(CHECKPOINT_DIR)


def heal_interfaces() -> list[str]:
    """The interfaces, or addresses of this host, by which ranks heal from those of other hosts; empty: the main one."""
    return [name for name in os.environ.get(HEAL_INTERFACES, "").split(",") if name]


def layout_text() -> str | None:
    """The layout of the job that the command line names; None for none."""
    return os.environ.get(LAYOUT)


def device_index() -> int:
    """The index of this process's CUDA device: what the agent has chosen, or LOCAL_RANK; 0 without both."""
    return int(os.environ.get(DEVICE) or os.environ.get("LOCAL_RANK", "0"))


def ask_size() -> int:
    """Ranks of larger groups ask for the rendezvous keys that they need; those of others get all keys."""
    return int(os.environ.get(ASK_SIZE) or 1024)


def run_dir() -> Path:
    """The directory in which the jobs of this user on this host are listed."""
    return Path(os.environ.get(RUN_DIR) or f"/tmp/elasticgang-{os.geteuid()}")


def is_own_directory(path: Path) -> bool:
    """Whether only this user can write to it. Raises OSError: it cannot be found."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def elastic_job() -> str | None:
    """The id of the elastic job of this process, or of the rank that started it; None outside of an elastic job."""
    return os.environ.get(JOB_ID)
