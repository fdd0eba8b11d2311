"""The name of the torch.distributed backend. Imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


BACKEND_NAME = "elasticgang"
