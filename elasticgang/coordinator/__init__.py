"""The coordinator's process: the server that decides records, and its state directory."""
