"""The command line: parses the arguments, calls the command, and returns its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from elasticgang.launch import commands
from elasticgang.launch.arguments import make_parser

EXIT_USAGE = 2
_COMMANDS = {
    "run": commands.run,
    "coordinator": commands.coordinator,
    "grant": commands.grant,
    "checkpoints": commands.checkpoints,
    "export": commands.export,
    "events": commands.events,
    "explain": commands.explain,
    "plan": commands.plan,
    "status": commands.status,
    "doctor": commands.doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    _open_standard_streams()
    args = make_parser().parse_args(argv)
    try:
        return _COMMANDS[args.command](args)
    except commands.UsageError as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _open_standard_streams() -> None:
    """Those that are closed: a socket would get the number, and what is written to the stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has the lowest free number


if __name__ == "__main__":
    sys.exit(main())
