"""The command line: parses the arguments, calls the command, and returns its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from elasticgang.errors import reason_of
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
_PRINTERS = frozenset({"grant", "checkpoints", "events", "explain", "plan", "status", "doctor"})  # they start nothing


def main(argv: Sequence[str] | None = None) -> int:
    _open_standard_streams()
    args = make_parser().parse_args(argv)
    try:
        code = _COMMANDS[args.command](args)
        if args.command in _PRINTERS and sys.stdout is not None:
            sys.stdout.flush()  # the end of the interpreter would fail in it
        return code
    except commands.UsageError as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `| head`
        _drop_output()
        return 0
    except OSError as exc:
        if args.command not in _PRINTERS:
            raise
        if exc.filename is not None:
            commands.print_unreadable(exc)
        else:
            _drop_output()
            print(f"elasticgang: error: the output cannot be written: {reason_of(exc)}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """What is not written yet: the end of the interpreter would try it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> None:
    """Those that are closed: a socket would get the number, and what is written to the stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has the lowest free number


if __name__ == "__main__":
    sys.exit(main())
