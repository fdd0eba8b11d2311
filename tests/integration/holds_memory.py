"""For a fork server to import: some memory."""

MEMORY = bytearray(16 << 20)
