"""The command line. It validates all arguments before it imports the agent or starts a process."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elasticgang.comm.kinds import DEFAULT_PROCESS_GROUP, PROCESS_GROUPS

if TYPE_CHECKING:
    from elasticgang.session.credentials import Credentials

EXIT_USAGE = 2
_MAX_JOB_ID = 100  # bytes: files are named by it
_LEAST_HANG_S = 0.5
_EXPORT = "elasticgang.checkpoint.export"
_MAX_SECONDS = 7 * 24 * 3600 + 1

_RUN_EXAMPLES = """\
examples:
  elasticgang run --nproc-per-node 4 train.py --lr 3e-4
      four ranks on this machine, with an embedded coordinator
  elasticgang run --nproc-per-node 4 --max-restarts 0 -m package.train
      a module; its first failure ends the job
  elasticgang run --nnodes 2:4 --coordinator 10.0.0.1:29400 --job-id NAME --nproc-per-node 8 train.py
      the same command on each host; `elasticgang coordinator` runs on 10.0.0.1. The job starts with two hosts and
      grows to four; the ranks of a fifth host are spares

A rank that is killed, or whose script fails, is restarted and heals from its peers. A kill does not count against
--max-restarts. A failure ends the job, with its traceback, if the rank has never committed a step, if the step has
failed before on any rank, or if --max-restarts is used up.
Exit code: 0 if the job finished, 1 (or the script's own) if it failed, 2 if it could not be started, 128+N if signal N
stopped it.
"""


_GRANT_DESCRIPTION = """\
Confirm to a coordinator that no other coordinator leads the job, and that the job's absent agents have exited.

After a restart without --state-dir, a coordinator leads a running job only once every agent of its last record has
reconnected. A coordinator that has lost all agents of a record does not decide the next one. In both cases, another
coordinator may lead the absent agents, and the job would be split in two. The agents log this ("waiting for ...",
"this takes an operator"). A coordinator cannot know that a host is gone for good, but an operator can:

  1. Make sure that no other coordinator of this job runs, and that the absent hosts run no rank of it (they are off,
     or their `elasticgang run` has exited).
  2. Start the agents that are to continue, if they are not running, and wait until they have connected.
  3. elasticgang grant --coordinator HOST:PORT --job-id NAME

The job then continues from the newest state that is left, or ends if a part of it is lost. Ranks live on while nothing
listens at the coordinator's address. Once a coordinator listens there that does not lead the job, or none can be
reached, they live for 8 seconds more, the lease: grant within 8 seconds of the coordinator's start. After that no state
is left, and the grant only ends the wait. So make sure of the absent hosts before you start the coordinator. A
coordinator with --state-dir needs no grant. A grant while absent ranks are alive can split the job in two. The
coordinator refuses a grant that the job does not wait for.
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        code: int = args.function(args)
    except _UsageError as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    return code


class _UsageError(Exception):
    pass


class _PrintVersion(argparse.Action):
    """Looks up the version only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        from importlib.metadata import version

        print(f"elasticgang {version('elasticgang')}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elasticgang", description="Run training jobs that go on while ranks die, hang, leave and return."
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script on the ranks of this host",
        description="Start a script as a number of ranks, restart ranks that die, and return the job's exit code.",
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_run_arguments(run)
    run.set_defaults(function=_run)
    coordinator = commands.add_parser(
        "coordinator",
        help="run a coordinator for jobs on several hosts",
        description="Decide which ranks are in each generation of one or more jobs, until SIGINT or SIGTERM. "
        "Training steps do not call it; agents do when the membership changes.",
    )
    coordinator.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    coordinator.add_argument("--port", type=_port, default=29400, help="0 for a free one (default: %(default)s)")
    coordinator.add_argument(
        "--state-dir",
        metavar="DIR",
        help="keep the jobs' records there, so that a restarted coordinator has them: without it, the coordinator "
        "leads a job again only once every agent of the job has come back",
    )
    _add_credentials_arguments(coordinator)
    coordinator.set_defaults(function=_coordinator)
    grant = commands.add_parser(
        "grant",
        help="let a coordinator lead a job without the agents that do not return",
        description=_GRANT_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    grant.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="the address of the coordinator")
    grant.add_argument("--job-id", required=True, metavar="NAME", help="the job")
    grant.add_argument(
        "--connect-timeout", type=_seconds, default=10.0, metavar="SECONDS", help="(default: %(default)g)"
    )
    _add_credentials_arguments(grant)
    grant.set_defaults(function=_grant)
    checkpoints = commands.add_parser(
        "checkpoints",
        help="list the durable checkpoints of a directory",
        description="List the complete checkpoints, newest first. Exit code: 0 if the newest can be used, 1 if not.",
    )
    checkpoints.add_argument("directory", metavar="DIR", help="the directory that the job saves to")
    checkpoints.add_argument("--verify", action="store_true", help="read all files, and check every digest")
    checkpoints.set_defaults(function=_checkpoints)
    export = commands.add_parser(
        "export",
        help="write the weights of a checkpoint as one file",
        description="Write the parameters and buffers of a checkpoint as one file, under the module's own names.",
    )
    export.add_argument("directory", metavar="DIR", help="a checkpoint, or a directory of them: its newest usable one")
    export.add_argument(
        "output", metavar="OUT", help="ends in .safetensors, or in .pt or .pth for a file that torch.load reads"
    )
    export.add_argument("--module", metavar="NAME", help="the registered module (default: the only one)")
    export.set_defaults(function=_export)
    return parser


def _add_credentials_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--secret-file",
        metavar="FILE",
        help="the secret by which agents and the coordinator authenticate each other; only its owner may read the file "
        "(default: the file that ELASTICGANG_SECRET_FILE names; without a secret or TLS, loopback addresses only)",
    )
    command.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="the certificate of this host, as PEM: agents, the coordinator and ranks speak TLS 1.3 and check each "
        "other's certificates, with a secret or without. The coordinator's must be for the host in --coordinator",
    )
    command.add_argument(
        "--tls-key",
        metavar="FILE",
        help="the private key of --tls-cert, which only its owner may read, without a passphrase",
    )
    command.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="the CA that has signed the certificates of all hosts; every holder of one of them can take part",
    )
    command.add_argument(
        "--insecure",
        action="store_true",
        help="allow other addresses than loopback without a secret or TLS, with a warning",
    )


def _add_run_arguments(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=int,
        default=1,
        metavar="N",
        help="ranks on this host (default: %(default)s)",
    )
    run.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="additional processes, each of which replaces a lost rank at once (default: %(default)s)",
    )
    run.add_argument(
        "--standalone",
        action="store_true",
        help="start an embedded coordinator for this job (the default without --coordinator)",
    )
    run.add_argument(
        "--coordinator",
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        metavar="HOST:PORT",
        help="use the coordinator at this address",
    )
    run.add_argument(
        "--nnodes",
        type=_nnodes,
        metavar="MIN:MAX",
        help="number of hosts, each with its own `elasticgang run`: the job starts with MIN hosts, and the ranks of "
        "hosts beyond MAX are spares; N means N:N (default: at least 1, no maximum)",
    )
    run.add_argument(
        "--coordinator-timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for an unreachable coordinator when it is needed, before the job fails "
        "(default: %(default)g)",
    )
    run.add_argument(
        "--connect-timeout",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long to try to reach the coordinator at the start (default: %(default)g)",
    )
    run.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=3,
        metavar="N",
        help="restarts of each rank within an hour after failures of its script (an exception, a non-zero exit code, a "
        "crash); 0: the first failure ends the job. A killed rank is always restarted (default: %(default)s)",
    )
    run.add_argument(
        "--job-id",
        "--rdzv-id",
        "--rdzv_id",
        metavar="NAME",
        help="the job's name at the coordinator; never use it again there (default: a unique one)",
    )
    run.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="the directory of durable checkpoints, the same one on all hosts, for scripts that call "
        "`manager.checkpoints(...)` without one",
    )
    run.add_argument(
        "--log-dir",
        "--log_dir",
        metavar="DIR",
        help="write events.jsonl there: the agent's actions, and one entry for each generation change",
    )
    run.add_argument(
        "--log-level",
        choices=["debug", "info", "warning"],
        default="info",
        help="level of the agent's log lines; info has one for each generation change (default: %(default)s)",
    )
    run.add_argument(
        "--grace-period",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="time from SIGINT or SIGTERM to this command, which forwards it to the ranks, until it kills them. On "
        "SIGTERM a rank finishes its step and leaves, if other hosts go on (default: %(default)g)",
    )
    run.add_argument(
        "--collective-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="time limit of a collective, after which the step is lost even if all peers are alive (default: "
        "%(default)g)",
    )
    run.add_argument(
        "--process-group",
        choices=PROCESS_GROUPS,
        default=DEFAULT_PROCESS_GROUP,
        metavar="NAME",
        help="the process groups of the gangs: isolated-gloo (Gloo in a process beside each rank; can always be "
        "aborted), gloo (torchft's Gloo within the rank; a rank whose collective cannot be aborted within a second is "
        "killed and restarted), nccl or isolated-nccl (CUDA). Votes always use isolated-gloo. "
        "elasticgang.join(process_group=...) overrides it (default: %(default)s)",
    )
    run.add_argument(
        "--hang-timeout",
        type=_hang_seconds,
        metavar="SECONDS",
        help="how long a rank may make no progress in the script's own code while others wait for it, before it is "
        "killed and restarted; at least 0.5; does not apply inside `manager.paused` and in the first steps (default: "
        "the maximum of 30, ten median steps, and twice the longest pause after which a rank went on). If all ranks "
        "make no progress for as long, none is killed, and a warning shows their Python stacks",
    )
    _add_credentials_arguments(run)
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", help="the training script")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, but is {text!r} instead") from None
    if not 0 < value < _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be greater than 0 and at most a week, but is {text} instead")
    return value


def _hang_seconds(text: str) -> float:
    value = _seconds(text)
    if value < _LEAST_HANG_S:
        raise argparse.ArgumentTypeError(
            f"must be at least {_LEAST_HANG_S:g}, but is {text} instead: healthy ranks can pause for as long"
        )
    return value


def _nnodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        fewest, most = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be N or MIN:MAX, but is {text!r} instead") from None
    if not 1 <= fewest <= most:
        raise argparse.ArgumentTypeError(f"must be N or MIN:MAX with 1 <= MIN <= MAX, but is {text!r} instead")
    return fewest, most


def _port(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, but is {text!r} instead") from None
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 65536, but is {text} instead")
    return value


def _check_run(args: argparse.Namespace) -> None:
    if args.nproc_per_node < 1:
        raise _UsageError(f"--nproc-per-node must be at least 1, but is {args.nproc_per_node} instead")
    if args.spares < 0:
        raise _UsageError(f"--spares must be at least 0, but is {args.spares} instead")
    if args.max_restarts < 0:
        raise _UsageError(f"--max-restarts must be at least 0, but is {args.max_restarts} instead")
    if args.standalone and args.coordinator:
        raise _UsageError("--standalone starts an embedded coordinator; leave out --coordinator or --standalone")
    if args.coordinator is None and args.nnodes not in (None, (1, 1)):
        raise _UsageError(
            "--nnodes of more than one host needs --coordinator, at an address that all hosts reach, and a --job-id"
        )
    if args.coordinator is not None and args.nnodes is not None and args.nnodes[1] > 1 and args.job_id is None:
        raise _UsageError("--nnodes of more than one host needs a --job-id, the same on all hosts")
    if args.job_id is not None and not 1 <= len(args.job_id.encode(errors="replace")) <= _MAX_JOB_ID:
        raise _UsageError(f"--job-id must be 1 to {_MAX_JOB_ID} bytes long, but is {args.job_id!r} instead")
    args.nnodes = args.nnodes or (1, 0)
    if args.coordinator is not None:
        _host_and_port(args.coordinator)
    if args.module:
        import importlib.util

        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(args.script)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise _UsageError(f"there is no module {args.script!r}")
    elif not os.path.isfile(args.script):
        raise _UsageError(f"there is no script at {args.script!r}")


def _run(args: argparse.Namespace) -> int:
    _check_run(args)
    credentials = _find_credentials(args, is_client=True)
    if args.coordinator is not None:
        host = args.coordinator.rpartition(":")[0]
        _check_reachable(args.coordinator, args.connect_timeout)
        _check_open(host, credentials, f"the agent uses a coordinator on loopback only, not at {host!r}")
    from elasticgang.errors import NotSupportedError
    from elasticgang.launch.availability import check_available
    from elasticgang.process.stop_signals import hold_stop_signals

    try:
        check_available(args.process_group)
    except NotSupportedError as exc:
        raise _UsageError(f"--process-group {args.process_group}: {exc}") from exc
    hold_stop_signals()
    from elasticgang.launch.run import run_job

    code = run_job(args, credentials)
    # All processes are reaped and the output is flushed. The interpreter would still wait for a thread that is in a
    # call to a resolver.
    os._exit(code)


def _grant(args: argparse.Namespace) -> int:
    import asyncio

    from elasticgang.errors import OperationalError
    from elasticgang.session.operator_client import grant

    host, port = _host_and_port(args.coordinator)
    credentials = _find_credentials(args, is_client=True)
    _check_open(host, credentials, f"an operator uses a coordinator on loopback only, not at {host!r}")
    try:
        print(asyncio.run(grant(host, port, args.job_id, credentials, args.connect_timeout)))
    except OperationalError as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return 1
    return 0


def _checkpoints(args: argparse.Namespace) -> int:
    from elasticgang.checkpoint import listing
    from elasticgang.errors import CheckpointError, NotSupportedError

    if not Path(args.directory).is_dir():
        raise _UsageError(f"there is no directory {args.directory!r}")
    problems = []
    try:
        for found in listing.scan(Path(args.directory)):
            problem, manifest = found.problem, found.manifest
            if args.verify and manifest is not None:
                try:
                    listing.verify(found.path, manifest)
                except CheckpointError as exc:
                    problem = str(exc)
            size = "?" if manifest is None else f"{manifest.num_bytes:,} bytes, {len(manifest.tensors)} tensors"
            sound = "every digest matches" if args.verify else "complete"
            print(f"{found.path.name}  step {found.attempt.step}  {size}  {problem or sound}")
            problems.append(problem)
    except (CheckpointError, NotSupportedError) as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return 1
    if not problems:
        print(f"elasticgang: there is no checkpoint in {args.directory}", file=sys.stderr)
    return 0 if problems and not problems[0] else 1


def _export(args: argparse.Namespace) -> int:
    output = Path(args.output)
    if output.suffix not in (".safetensors", ".pt", ".pth"):
        raise _UsageError(f"OUT must end in .safetensors, .pt or .pth, but is {args.output!r} instead")
    if not Path(args.directory).is_dir():
        raise _UsageError(f"there is no directory {args.directory!r}")
    import subprocess

    command = [sys.executable, "-m", _EXPORT, args.directory, args.output, *([args.module] if args.module else [])]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode  # torch is imported there


def _host_and_port(address: str) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdecimal() and int(port) < 1 << 16):
        raise _UsageError(f"--coordinator must be HOST:PORT, but is {address!r} instead")
    return host, int(port)


def _find_credentials(args: argparse.Namespace, *, is_client: bool) -> Credentials:
    from elasticgang.errors import OperationalError
    from elasticgang.session.credentials import Credentials
    from elasticgang.session.secret import find_secret
    from elasticgang.session.tls import read_tls

    try:
        secret = find_secret(args.secret_file and Path(args.secret_file), os.environ)
        files = (path and Path(path) for path in (args.tls_cert, args.tls_key, args.tls_ca))
        return Credentials(secret, read_tls(*files, is_client=is_client), args.insecure)
    except OperationalError as exc:
        raise _UsageError(str(exc)) from exc


def _check_open(host: str, credentials: Credentials, what: str) -> None:
    """Refuse sessions with `host` that would be open to other hosts; warn of them with --insecure. `what`: see
    `Credentials.check_address`."""
    from elasticgang.errors import OperationalError

    try:
        credentials.check_address(host, what)
        is_open = credentials.is_open_at(host)
    except OperationalError as exc:
        raise _UsageError(str(exc)) from exc
    except (OSError, UnicodeError) as exc:
        raise _UsageError(f"the host {host!r} cannot be resolved") from exc
    if is_open:
        print(f"elasticgang: warning: --insecure: anybody who reaches {host} can take part", file=sys.stderr)


def _check_reachable(address: str, timeout: float) -> None:
    import time

    from elasticgang.session.addresses import probe

    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            return probe(host, int(port), deadline - time.monotonic())
        except UnicodeError as exc:
            raise _UsageError(f"--coordinator: {host!r} is not a valid host name") from exc
        except OSError as exc:
            if time.monotonic() + 0.2 > deadline:
                reason = exc.strerror or str(exc)
                raise _UsageError(f"cannot reach the coordinator at {address} within {timeout:g} s: {reason}") from exc
            time.sleep(0.1)


def _coordinator(args: argparse.Namespace) -> int:
    import socket

    if args.port:  # a short answer, before the modules of the coordinator are imported
        try:
            socket.create_server((args.host, args.port)).close()
        except OSError as exc:
            reason = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror or str(exc)
            raise _UsageError(f"cannot listen on {args.host}:{args.port}: {reason}") from exc
    credentials = _find_credentials(args, is_client=False)
    _check_open(args.host, credentials, f"the coordinator listens on loopback only, not on {args.host!r}")
    from elasticgang.process.stop_signals import hold_stop_signals

    hold_stop_signals()
    from elasticgang.launch.run import run_coordinator

    return run_coordinator(args, credentials)


if __name__ == "__main__":
    sys.exit(main())
