"""Excludes process groups from torch.compile.

While a compiled function runs, torch.compile traces every Python frame outside torch, also those that C++ calls. DDP's
reducer calls methods of the process group from a compiled model's forward. torch.compile cannot trace them and raises.
torch's own groups have no Python frames.
"""

from __future__ import annotations

import types

from elasticgang.torch_private import run_untraced


def leave_untraced(cls: type) -> None:
    """Let torch.compile run the functions of `cls`, and the functions that they call, without tracing them."""
    for attribute in vars(cls).values():
        function = attribute.fget if isinstance(attribute, property) else attribute
        if isinstance(function, types.FunctionType):
            run_untraced(function)
