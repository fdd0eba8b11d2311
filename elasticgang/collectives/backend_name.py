"""The name of the torch.distributed backend. Imports nothing."""

from __future__ import annotations

BACKEND_NAME = "elasticgang"
