"""The options of the commands, and their types; a type refuses what is wrong by itself. `commands.py` checks more."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from elasticgang.comm.kinds import PROCESS_GROUPS
from elasticgang.errors import LayoutError
from elasticgang.layout.parallel_layout import NOTATION, NOTATION_HELP, ParallelLayout
from elasticgang.observe.event_names import EventName

COORDINATOR_PORT = 29400
_LEAST_HANG_S = 0.5
_MAX_SECONDS = 7 * 24 * 3600 + 1
_WHICH_EVENTS = (
    "a job's name, its --log-dir, or the file events.jsonl in it (default: the job that began last on this host; of "
    "those that run, if any does)"
)

_RUN_EXAMPLES = """\
examples:
  elasticgang run --nproc-per-node 4 train.py --lr 3e-4
      four ranks on this machine, with an embedded coordinator
  elasticgang run --nproc-per-node 4 --max-restarts 0 -m package.train
      a module; its first failure ends the job
  elasticgang run --nproc-per-node 8 --layout sdp=4,min_replicas=2/sdp=2 train.py
      two replica groups of four ranks, and groups of two while the ranks cannot fill them; train.py calls
      elasticgang.join() without a layout
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


class _CommandParser(argparse.ArgumentParser):
    """The parser of one command. An option that it does not know is its error, with its usage; argparse would leave it
    to the parser of all commands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


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
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND", parser_class=_CommandParser)
    run = commands.add_parser(
        "run",
        help="run a script on the ranks of this host",
        description="Start a script as a number of ranks, restart ranks that die, and return the job's exit code.",
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_run_arguments(run)
    coordinator = commands.add_parser(
        "coordinator",
        help="run a coordinator for jobs on several hosts",
        description="Decide which ranks are in each generation of one or more jobs, until SIGINT or SIGTERM. "
        "Training steps do not call it; agents do when the membership changes. After SIGTERM it ends once the agents "
        "have left that got SIGTERM with it; after another one, or SIGINT, at once.",
    )
    coordinator.add_argument(
        "--host", type=_host, default="127.0.0.1", help="the address to listen on (default: %(default)s)"
    )
    coordinator.add_argument(
        "--port", type=_port, default=COORDINATOR_PORT, help="0 for a free one (default: %(default)s)"
    )
    coordinator.add_argument(
        "--state-dir",
        metavar="DIR",
        help="keep the jobs' records there, so that a restarted coordinator has them: without it, the coordinator "
        "leads a job again only once every agent of the job has come back",
    )
    coordinator.add_argument(
        "--advertise",
        metavar="HOST:PORT",
        help="the address at which agents reach it, wherever it runs: a virtual IP address, or a service of "
        "Kubernetes. With --state-dir, a coordinator that is started on another machine then declares agents lost as "
        "one that is started on the same. Never a DNS name that is changed to the new machine: agents could still ask "
        "the old one (default: this machine's name and --port)",
    )
    _add_credentials_arguments(coordinator)
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
    checkpoints = commands.add_parser(
        "checkpoints",
        help="list the durable checkpoints of a directory or URL",
        description="List the complete checkpoints, newest first. Exit code: 0 if the newest can be used, 1 if not.",
    )
    checkpoints.add_argument("directory", metavar="DIR", help="the directory or URL that the job saves to")
    checkpoints.add_argument("--verify", action="store_true", help="read all files, and check every digest")
    export = commands.add_parser(
        "export",
        help="write the weights of a checkpoint as one file",
        description="Write the parameters and buffers of a checkpoint as one file, under the module's own names.",
    )
    export.add_argument(
        "directory", metavar="DIR", help="a checkpoint, or a directory or URL of them: its newest usable one"
    )
    export.add_argument(
        "output", metavar="OUT", help="ends in .safetensors, or in .pt or .pth for a file that torch.load reads"
    )
    export.add_argument("--module", metavar="NAME", help="the registered module (default: the only one)")
    _add_events_arguments(
        commands.add_parser(
            "events",
            help="print an agent's events",
            description="Print the events of an agent, one line each.",
        )
    )
    explain = commands.add_parser(
        "explain",
        help="tell why the generation changed",
        description="Tell each loss of ranks as a short story: the cause, who left, what became of the step under way, "
        "how long each phase took, and who came back.",
    )
    explain.add_argument("job", nargs="?", metavar="JOB", help=_WHICH_EVENTS)
    explain.add_argument(
        "generation", type=int, nargs="?", metavar="GENERATION", help="the change to this one alone, also a planned one"
    )
    _add_status_arguments(
        commands.add_parser(
            "status",
            help="show what the jobs of this host do",
            description="Print generation, seats, steps a second, goodput, and the last generation changes of each job "
            "that this user runs on this host. It only reads. Exit code: 0 if a job runs, 1 if none does.",
        )
    )
    plan = commands.add_parser(
        "plan",
        help="show who gets which seat when ranks are lost and return",
        description="Print what the planner decides for ranks that are lost and return, in the order given: who keeps "
        "which seat, and who fetches state from how many holders. No process is started.",
        epilog="example:\n"
        "  elasticgang plan --hosts 16 --ranks-per-host 8 --tp 8 --kill host3/rank2 --join host3/rank2\n"
        "  elasticgang plan --hosts 2 --ranks-per-host 4 --layout sdp=4,min_replicas=2/sdp=2 --kill host1/rank0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_plan_arguments(plan)
    _add_doctor_arguments(
        commands.add_parser(
            "doctor",
            help="check whether this host can run a job",
            description="Check versions, devices, memory, limits, the network and disks, and print one line for each: "
            "ok, a warning or an error, with the mend. It starts no job. Exit code: 1 if there is an error, else 0.",
        )
    )
    return parser


def _add_doctor_arguments(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument(
        "--nproc-per-node", type=_at_least_one, default=8, metavar="N", help="ranks on this host (default: %(default)s)"
    )
    doctor.add_argument(
        "--nnodes", type=_at_least_one, default=1, metavar="N", help="hosts of the job (default: %(default)s)"
    )
    doctor.add_argument(
        "--checkpoint-dir", metavar="DIR", help="the directory of durable checkpoints, to check too; a URL is not tried"
    )
    doctor.add_argument("--coordinator", metavar="HOST:PORT", help="the address of a coordinator, to connect to")
    doctor.add_argument(
        "--connect-timeout", type=_seconds, default=10.0, metavar="SECONDS", help="(default: %(default)g)"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object")


def _add_events_arguments(events: argparse.ArgumentParser) -> None:
    events.add_argument("job", nargs="?", metavar="JOB", help=_WHICH_EVENTS)
    events.add_argument("-f", "--follow", action="store_true", help="wait for further events, until Ctrl-C")
    events.add_argument(
        "--event",
        action="append",
        type=_event_name,
        metavar="NAME",
        help="only events of this name; may be given several times. Names: " + ", ".join(get_args(EventName)),
    )
    events.add_argument("--json", action="store_true", help="the lines as they are in the file, long lists too")


def _add_status_arguments(status: argparse.ArgumentParser) -> None:
    status.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="a job's name, or the --log-dir of one, also of one that has ended (default: all that run)",
    )
    status.add_argument("-w", "--watch", action="store_true", help="again every second, until Ctrl-C or their end")
    status.add_argument("--json", action="store_true", help="one JSON object for each agent and reading")


class _Action(argparse.Action):
    """Keeps the order of different options."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        actions = [*(getattr(namespace, self.dest) or ()), (str(option).lstrip("-"), values)]
        setattr(namespace, self.dest, actions)


def _add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    for name, text in (("hosts", "hosts at the start"), ("ranks-per-host", "ranks of each host")):
        plan.add_argument(f"--{name}", type=_at_least_one, required=True, metavar="N", help=text)
    plan.add_argument(
        "--layout",
        type=layout_of,
        metavar=NOTATION,
        help=f"{NOTATION_HELP} (default: sdp=1)",
    )
    for axis in ("pp", "sdp", "tp"):
        plan.add_argument(f"--{axis}", type=_at_least_one, metavar="N", help=f"the same as --layout {axis}=N")
    plan.add_argument(
        "--max-replicas", type=_at_least_one, metavar="N", help="replica groups; ranks beyond them are spares"
    )
    plan.add_argument(
        "--kill",
        action=_Action,
        dest="actions",
        metavar="NAMES",
        help="lose these at once: host3 or host3/rank2, with commas between; may be given several times",
    )
    plan.add_argument("--join", action=_Action, dest="actions", metavar="NAMES", help="these come, or come back")
    plan.add_argument(
        "--state-bytes",
        type=_at_least_one,
        metavar="N",
        help="of one whole copy of the training state, to show how many bytes move to another layout",
    )
    plan.add_argument("--json", action="store_true", help="one JSON object for each change, with the whole plan")


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
        "other's certificates, with a secret or without. The coordinator's must be for the host in --coordinator. New "
        "files count without a restart",
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
        "--layout",
        type=layout_of,
        metavar=NOTATION,
        help="the layout for scripts that call elasticgang.join() without one, the same on all hosts: "
        f"{NOTATION_HELP}. "
        "While the ranks cannot fill the first layout, the job takes the next one that they fill",
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
        "--device-faults",
        type=int,
        default=2,
        metavar="N",
        help="restarts of a rank on its device within an hour after failures of the device (CUDA errors such as an "
        "illegal memory access or ECC, or elasticgang.DeviceError). The next failure quarantines the device: the rank "
        "continues on a spare device of this host, or is not restarted (default: %(default)s)",
    )
    run.add_argument(
        "--devices",
        type=_devices,
        metavar="LIST",
        help="the indices of the CUDA devices for this host's ranks, with commas between; those beyond the number of "
        "ranks are spare (default: all that CUDA_VISIBLE_DEVICES or /dev shows)",
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
        "`manager.checkpoints(...)` without one; or a URL of fsspec, such as s3://BUCKET/RUN, which needs "
        "pip install 'elasticgang[fsspec]'",
    )
    run.add_argument(
        "--heal-interfaces",
        type=_interfaces,
        metavar="LIST",
        help="interfaces of this host, or addresses of them, with commas between, such as eth0,eth1: ranks of "
        "other hosts heal from this host by all of them at once, a part of the state by each. One that is down is left "
        "out (default: the address by which this host reaches the coordinator)",
    )
    run.add_argument(
        "--log-dir",
        "--log_dir",
        metavar="DIR",
        help="write events.jsonl there: the agent's actions, and one entry for each generation change; each agent "
        "needs a directory of its own",
    )
    for what, text in (
        ("status", "serve a page that shows the job, read-only"),
        ("metrics", "serve Prometheus metrics at /metrics; needs pip install 'elasticgang[metrics]'"),
    ):
        run.add_argument(
            f"--{what}-port",
            type=_listen_address,
            metavar="[HOST:]PORT",
            help=f"{text}; on loopback unless HOST is given, and then without authentication; 0 for a free port",
        )
    run.add_argument(
        "--tensorboard-dir",
        metavar="DIR",
        help="write TensorBoard scalars to DIR/JOB_ID, on one agent of the job; needs pip install "
        "'elasticgang[tensorboard]'",
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
        metavar="SECONDS",
        help="time from SIGINT or SIGTERM to this command, which forwards it to the ranks, until it kills them. On the "
        "first SIGTERM a rank finishes its step and leaves; with checkpoints, the last ones save the state before. "
        "Let systemd, Docker or Kubernetes wait longer than that (default: 30 after the first SIGTERM, 1 after another "
        "signal)",
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
        metavar="NAME",
        help="the process groups of the gangs: isolated-gloo (Gloo in a process beside each rank; can always be "
        "aborted), gloo (torchft's Gloo within the rank; a rank whose collective cannot be aborted within a second is "
        "killed and restarted), nccl or isolated-nccl (CUDA). Votes always use isolated-gloo. "
        "elasticgang.join(process_group=...) overrides it (default: nccl for ranks on CUDA, isolated-gloo otherwise)",
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
    run.add_argument(
        "--compare-state",
        type=_at_least_one,
        default=0,
        metavar="N",
        help="after every N steps, before each checkpoint, and after the last step, compare the parameters and the "
        "optimizers' state of ranks that hold the same part of the model, bit by bit. Ranks that differ from more than "
        "half of them end, as after a failure of the script; without such a majority the job ends. The same on all "
        "hosts. Hosts of unlike hardware may round differently (default: never)",
    )
    _add_credentials_arguments(run)
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", help="the training script")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False


def layout_of(text: str) -> ParallelLayout:
    try:
        return ParallelLayout.parse(text)
    except LayoutError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _event_name(text: str) -> str:
    if text not in get_args(EventName):
        known = ", ".join(get_args(EventName))
        raise argparse.ArgumentTypeError(f"there is no event {text!r}; the names are {known}")
    return text


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, but is {text!r} instead")
    return int(text)


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


def _devices(text: str) -> tuple[int, ...]:
    indices = text.split(",")
    if not all(index.isdecimal() for index in indices) or len(set(map(int, indices))) < len(indices):
        raise argparse.ArgumentTypeError(f"must be different indices with commas between, but is {text!r} instead")
    return tuple(map(int, indices))


def _interfaces(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"must be different names of interfaces, or addresses, with commas between, but is {text!r} instead"
        )
    return names


def _nnodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        fewest, most = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be N or MIN:MAX, but is {text!r} instead") from None
    if not 1 <= fewest <= most:
        raise argparse.ArgumentTypeError(f"must be N or MIN:MAX with 1 <= MIN <= MAX, but is {text!r} instead")
    return fewest, most


def _listen_address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if separator and not host:
        raise argparse.ArgumentTypeError(f"must be PORT or HOST:PORT, but is {text!r} instead")
    return host.strip("[]") or "127.0.0.1", _port(port)


def _host(text: str) -> str:
    return text.strip("[]")


def _port(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, but is {text!r} instead") from None
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 65536, but is {text} instead")
    return value
