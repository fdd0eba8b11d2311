"""Training state: snapshots of it, the server for peers, and healing from peers."""

from elasticgang.state.snapshot_server import SnapshotServer

__all__ = ["SnapshotServer"]
