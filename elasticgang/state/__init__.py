"""Training state: kept aside, served to peers, and healed from them."""

from elasticgang.state.snapshot_server import SnapshotServer

__all__ = ["SnapshotServer"]
