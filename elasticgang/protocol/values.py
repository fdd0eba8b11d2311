"""The decorator of messages, events and instructions: values of which each record, step and heartbeat makes several.

Pure. The type checker takes `@value(frozen=True)` for a frozen dataclass, so that nothing changes a value that others
may have. At runtime its fields are ordinary: a frozen dataclass takes twice as long to make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    import dataclasses

    def value(*, frozen):
        """A dataclass that is equal to others, and hashed, by its fields. `frozen`: as the type checker sees it."""
        return dataclasses.dataclass(unsafe_hash=frozen)


__all__ = ["value"]
