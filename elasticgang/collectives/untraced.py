"""Keeps torch.compile out of process groups.

While a compiled function runs, torch.compile traces every Python frame that is not torch's own, also one that C++
calls: DDP's reducer calls a process group's methods from a compiled model's forward. It cannot trace them, and raises.
Torch's own groups have no Python frames.
"""

from __future__ import annotations

import types

from elasticgang.torch_private import run_untraced


def leave_untraced(cls: type) -> None:
    """Let torch.compile run the functions that `cls` defines, and what they call, as they are."""
    for attribute in vars(cls).values():
        function = attribute.fget if isinstance(attribute, property) else attribute
        if isinstance(function, types.FunctionType):
            run_untraced(function)
