"""The commands. Each validates all of its arguments before it imports what it needs or starts a process."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from elasticgang.layout import ParallelLayout
    from elasticgang.session.credentials import Credentials

_MAX_JOB_ID = 100  # bytes: files are named by it
_WATCH_S = 1.0
_EXPORT = "elasticgang.checkpoint.export"


class UsageError(Exception):
    """The arguments make no sense, or what they name is not there. Nothing was started."""


def run(args: argparse.Namespace) -> int:
    _check_directory()
    _check_run(args)
    credentials = _find_credentials(args, is_client=True)
    if args.heal_interfaces is not None:
        _check_interfaces(args.heal_interfaces, credentials)
    if args.coordinator is not None:
        host, _ = _host_and_port(args.coordinator)
        _check_reachable(args.coordinator, args.connect_timeout)
        _check_open(host, credentials, f"the agent uses a coordinator on loopback only, not at {host!r}")
    from elasticgang.errors import NotSupportedError
    from elasticgang.launch.availability import check_available
    from elasticgang.process.stop_signals import hold_stop_signals

    _check_lasting(args.checkpoint_dir)
    try:
        if args.process_group is not None:  # else the ranks choose it by their device
            check_available(args.process_group)
    except NotSupportedError as exc:
        raise UsageError(f"--process-group {args.process_group}: {exc}") from exc
    listeners = _listen(args)
    hold_stop_signals()
    from elasticgang.launch.run import run_job

    code = run_job(args, credentials, listeners)
    # All processes are reaped and the output is flushed. The interpreter would still wait for a thread that is in a
    # call to a resolver.
    os._exit(code)


def coordinator(args: argparse.Namespace) -> int:
    import socket

    from elasticgang.session.addresses import family_of, listen_failure

    try:
        args.host.encode("idna")
    except UnicodeError as exc:
        raise UsageError(f"--host: {args.host!r} is not a valid host name") from exc
    if args.port:  # a short answer, before the modules of the coordinator are imported
        try:
            socket.create_server((args.host, args.port), family=family_of(args.host)).close()
        except OSError as exc:
            raise UsageError(listen_failure(args.host, args.port, exc)) from exc
    if args.advertise is not None:
        _host_and_port(args.advertise, "--advertise")
    credentials = _find_credentials(args, is_client=False)
    _check_open(args.host, credentials, f"the coordinator listens on loopback only, not on {args.host!r}")
    from elasticgang.process.stop_signals import hold_stop_signals

    hold_stop_signals()
    from elasticgang.launch.run import run_coordinator

    return run_coordinator(args, credentials)


def grant(args: argparse.Namespace) -> int:
    host, port = _host_and_port(args.coordinator)
    _check_job_id(args.job_id)
    import asyncio

    from elasticgang.errors import OperationalError
    from elasticgang.session import operator_client

    credentials = _find_credentials(args, is_client=True)
    _check_open(host, credentials, f"an operator uses a coordinator on loopback only, not at {host!r}")
    try:
        print(asyncio.run(operator_client.grant(host, port, args.job_id, credentials, args.connect_timeout)))
    except OperationalError as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return 1
    return 0


def checkpoints(args: argparse.Namespace) -> int:
    import time

    from elasticgang.checkpoint import listing
    from elasticgang.checkpoint.locations import storage_at
    from elasticgang.errors import CheckpointError, NotSupportedError, OperationalError
    from elasticgang.progress import Progress

    _check_location(args.directory)
    problems = []
    try:
        storage = storage_at(args.directory)
        for found in listing.scan(storage):
            problem, manifest = found.problem, found.manifest
            if args.verify and manifest is not None:
                try:
                    with Progress(found.folder.name, manifest.num_bytes, sys.stderr, time.monotonic) as progress:
                        listing.verify(found.folder, manifest, progress.add)
                except CheckpointError as exc:
                    problem = str(exc)
            size = "?"
            if manifest is not None:
                size = f"{manifest.num_bytes:,} bytes, {len(manifest.tensors)} tensors, manifest {manifest.digest}"
            sound = "every digest matches" if args.verify else "complete"
            print(f"{found.folder.name}  step {found.attempt.step}  {size}  {problem or sound}")
            problems.append(problem)
    except (CheckpointError, NotSupportedError, OperationalError) as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return 1
    if not problems:
        print(f"elasticgang: there is no checkpoint in {storage.path}", file=sys.stderr)
    return 0 if problems and not problems[0] else 1


def _check_location(location: str) -> None:
    """Raises UsageError: it is neither a URL nor a directory."""
    from elasticgang.checkpoint.locations import is_url

    if not is_url(location) and not Path(location).is_dir():
        raise UsageError(f"there is no directory {location!r}")


def export(args: argparse.Namespace) -> int:
    output = Path(args.output)
    if output.suffix not in (".safetensors", ".pt", ".pth"):
        raise UsageError(f"OUT must end in .safetensors, .pt or .pth, but is {args.output!r} instead")
    _check_location(args.directory)
    import subprocess

    from elasticgang.process.own_modules import command_of

    command = command_of(_EXPORT, args.directory, args.output, *([args.module] if args.module else []))
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode  # torch is imported there


def events(args: argparse.Namespace) -> int:
    import json

    from elasticgang.observe.event_file import read_events
    from elasticgang.observe.story import line_of

    path = _event_file(args.job)
    for event in read_events(path, _warn, follows=args.follow):
        if not args.event or event["event"] in args.event:
            print(json.dumps(event) if args.json else line_of(event), flush=args.follow)
    return 0


def explain(args: argparse.Namespace) -> int:
    from elasticgang.observe.event_file import read_events, read_incident
    from elasticgang.observe.story import NoSuchChange, tell
    from elasticgang.watch import registry

    generation = args.generation
    if generation is None and (args.job or "").isdecimal() and registry.newest(args.job) is None:
        args.job, generation = None, int(args.job)  # `elasticgang explain 7`
    path = _event_file(args.job)
    is_alive = registry.is_running(path)  # first: the last events of an agent that ends are read then
    found = read_events(path, _warn)
    try:
        for line in tell(found, generation, lambda generation: read_incident(path.parent, generation, _warn), is_alive):
            print(line)
    except NoSuchChange as exc:
        raise UsageError(str(exc)) from exc
    except (AttributeError, LookupError, TypeError, ValueError) as exc:
        print(f"elasticgang: error: {path} has an event of another version: {exc!r}", file=sys.stderr)
        return 1
    return 0


def status(args: argparse.Namespace) -> int:
    import json
    import time

    from elasticgang.watch import registry
    from elasticgang.watch.reader import JobReader
    from elasticgang.watch.terminal import lines_of

    readers = [JobReader(path, is_alive, _warn) for path, is_alive in registry.find(args.job)]
    if not readers:
        what = "no job runs" if args.job is None else f"there is no job {args.job!r}, and no event file in it,"
        print(f"elasticgang: {what} on this host, as far as this user can see", file=sys.stderr)
        return 1
    while True:
        found = []
        for reader in readers.copy():
            try:
                found.append(reader.read())
            except OSError as exc:
                print_unreadable(exc)
                readers.remove(reader)
        if not found:
            return 1
        if args.json:
            print("\n".join(map(json.dumps, found)), flush=True)
        else:
            text = "\n\n".join("\n".join(lines_of(each)) for each in found)
            print(f"\x1b[2J\x1b[H{text}" if args.watch and sys.stdout.isatty() else text, flush=True)
        is_running = any(each["state"] in ("starting", "running") for each in found)
        if not (args.watch and is_running):
            return 0 if is_running else 1
        time.sleep(_WATCH_S)


def plan(args: argparse.Namespace) -> int:
    from elasticgang.errors import LayoutError
    from elasticgang.launch.plan import Fleet, as_json, explore, lines_of

    try:
        fleet, layout = Fleet(args.hosts, args.ranks_per_host), _planned_layout(args)
        for what, found in explore(fleet, layout, args.actions or (), args.max_replicas):
            lines = lines_of(what, found, layout, args.state_bytes)
            print(as_json(what, found) if args.json else "\n".join(lines))
    except LayoutError as exc:
        print(f"elasticgang: {exc}", file=sys.stderr)
        return 1
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    return 0


def _planned_layout(args: argparse.Namespace) -> ParallelLayout:
    """Raises ValueError: sizes are given beside --layout."""
    from elasticgang.layout import ParallelLayout

    sizes = {axis: size for axis in ("pp", "sdp", "tp") if (size := getattr(args, axis)) is not None}
    if args.layout is not None and sizes:
        raise ValueError(f"--{next(iter(sizes))} is a part of --layout: give the one or the other")
    return args.layout or ParallelLayout(**sizes)


def doctor(args: argparse.Namespace) -> int:
    import json

    from elasticgang.checkpoint.locations import is_url
    from elasticgang.doctor.facts import gather
    from elasticgang.doctor.verdicts import Job, as_json, exit_code, judge, lines_of
    from elasticgang.launch.arguments import COORDINATOR_PORT

    address = None if args.coordinator is None else _host_and_port(args.coordinator)
    checkpoints: Path | str | None = args.checkpoint_dir
    _check_lasting(args.checkpoint_dir)
    if args.checkpoint_dir is not None:
        checkpoints = args.checkpoint_dir if is_url(args.checkpoint_dir) else Path(args.checkpoint_dir)
    facts = gather(
        port=COORDINATOR_PORT,
        checkpoints=checkpoints,
        coordinator=address,
        timeout_s=args.connect_timeout,
    )
    findings = judge(facts, Job(args.nproc_per_node, args.nproc_per_node * args.nnodes))
    print(json.dumps(as_json(findings)) if args.json else "\n".join(lines_of(findings)))
    return exit_code(findings)


def _event_file(job: str | None) -> Path:
    """Raises UsageError: there is none."""
    from elasticgang.watch import registry

    path = registry.newest(job)
    if path is None and job is None:
        raise UsageError("no job runs on this host, or has run lately, as far as this user can see: name a JOB")
    if path is None:
        what = f"there is no job {job!r}, and there are no events at {job}"
        raise UsageError(f"{what}: `elasticgang run --log-dir DIR` writes them")
    if job is None:
        print(f"elasticgang: the events at {path}", file=sys.stderr)
    return path


def print_unreadable(error: OSError) -> None:
    from elasticgang.errors import reason_of

    print(f"elasticgang: error: {error.filename} cannot be read: {reason_of(error)}", file=sys.stderr)


def _warn(text: str) -> None:
    print(f"elasticgang: warning: {text}", file=sys.stderr)


def _listen(args: argparse.Namespace) -> dict[str, socket.socket]:
    """Open the ports of the page and of the metrics, and see that the scalars can be written."""
    wanted = {"page": ("--status-port", args.status_port), "metrics": ("--metrics-port", args.metrics_port)}
    if args.tensorboard_dir is None and not any(address for _, address in wanted.values()):
        return {}
    from elasticgang.errors import OperationalError
    from elasticgang.watch import serving

    listeners = {}
    try:
        if args.metrics_port is not None:
            serving.check_metrics("--metrics-port")
        if args.tensorboard_dir is not None:
            serving.check_tensorboard(args.tensorboard_dir, "--tensorboard-dir")
        for what, (option, address) in wanted.items():
            if address is not None:
                host, port = address
                listeners[what] = serving.listen(host, port, option)
    except OperationalError as exc:
        raise UsageError(str(exc)) from exc
    return listeners


def _check_run(args: argparse.Namespace) -> None:
    if args.nproc_per_node < 1:
        raise UsageError(f"--nproc-per-node must be at least 1, but is {args.nproc_per_node} instead")
    if args.spares < 0:
        raise UsageError(f"--spares must be at least 0, but is {args.spares} instead")
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts must be at least 0, but is {args.max_restarts} instead")
    if args.device_faults < 0:
        raise UsageError(f"--device-faults must be at least 0, but is {args.device_faults} instead")
    if args.devices is not None and len(args.devices) < args.nproc_per_node + args.spares:
        raise UsageError(
            f"--devices must name one device for each of the {args.nproc_per_node + args.spares} ranks and spares, but "
            f"names {len(args.devices)}"
        )
    if args.standalone and args.coordinator:
        raise UsageError("--standalone starts an embedded coordinator; leave out --coordinator or --standalone")
    if args.coordinator is None and args.nnodes not in (None, (1, 1)):
        raise UsageError(
            "--nnodes of more than one host needs --coordinator, at an address that all hosts reach, and a --job-id"
        )
    if args.coordinator is not None and args.nnodes is not None and args.nnodes[1] > 1 and args.job_id is None:
        raise UsageError("--nnodes of more than one host needs a --job-id, the same on all hosts")
    if args.heal_interfaces is not None and args.coordinator is None:
        raise UsageError("--heal-interfaces is for jobs of several hosts: it needs --coordinator")
    if args.job_id is not None:
        _check_job_id(args.job_id)
    args.nnodes = args.nnodes or (1, 0)
    if args.coordinator is not None:
        _host_and_port(args.coordinator)
    if args.module:
        _check_module(args.script)
    elif not os.path.isfile(args.script):
        raise UsageError(f"there is no script at {args.script!r}")


def _check_directory() -> None:
    """Neither Python nor torch can be imported by the processes of a job where it is gone."""
    try:
        os.getcwd()
    except OSError as exc:
        raise UsageError(
            f"the working directory cannot be found ({exc.strerror}): change to one that is there"
        ) from exc


def _check_lasting(checkpoint_dir: str | None) -> None:
    from elasticgang.checkpoint.locations import check_lasting
    from elasticgang.errors import NotSupportedError

    try:
        if checkpoint_dir is not None:
            check_lasting(checkpoint_dir)
    except NotSupportedError as exc:
        raise UsageError(f"--checkpoint-dir: {exc}") from exc


def _check_job_id(job_id: str) -> None:
    try:
        num_bytes = len(job_id.encode())
    except UnicodeEncodeError as exc:  # the command line had bytes that are no UTF-8
        raise UsageError(f"--job-id must be UTF-8, but is {os.fsencode(job_id)!r} instead") from exc
    if not 1 <= num_bytes <= _MAX_JOB_ID:
        raise UsageError(f"--job-id must be 1 to {_MAX_JOB_ID} bytes long, but is {job_id!r} instead")


def _check_module(name: str) -> None:
    """Look for the package that has the module, which imports nothing. The ranks import it, and report what fails."""
    import importlib.util

    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UsageError(f"there is no module {name!r}")


def _check_interfaces(names: Sequence[str], credentials: Credentials) -> None:
    from elasticgang.errors import OperationalError
    from elasticgang.session.host_addresses import addresses_of

    try:
        addresses = addresses_of(names)
    except OperationalError as exc:
        raise UsageError(f"--heal-interfaces: {exc}") from exc
    for address in addresses:
        _check_open(address, credentials, f"ranks serve their state on loopback only, not at {address!r}")


def _host_and_port(address: str, option: str = "--coordinator") -> tuple[str, int]:
    from elasticgang.session.addresses import host_and_port

    host, port = host_and_port(address)
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"{option} must be HOST:PORT, but is {address!r} instead")
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
        raise UsageError(str(exc)) from exc


def _check_open(host: str, credentials: Credentials, what: str) -> None:
    """Refuse sessions with `host` that would be open to other hosts; warn of them with --insecure. `what`: see
    `Credentials.check_address`."""
    from elasticgang.errors import OperationalError

    try:
        credentials.check_address(host, what)
        is_open = credentials.is_open_at(host)
    except OperationalError as exc:
        raise UsageError(str(exc)) from exc
    except (OSError, UnicodeError) as exc:
        raise UsageError(f"the host {host!r} cannot be resolved") from exc
    if is_open:
        print(f"elasticgang: warning: --insecure: anybody who reaches {host} can take part", file=sys.stderr)


def _check_reachable(address: str, timeout: float) -> None:
    import time

    from elasticgang.errors import reason_of
    from elasticgang.session.addresses import host_and_port, probe

    host, port = host_and_port(address)
    deadline = time.monotonic() + timeout
    while True:
        try:
            return probe(host, int(port), deadline - time.monotonic())
        except UnicodeError as exc:
            raise UsageError(f"--coordinator: {host!r} is not a valid host name") from exc
        except OSError as exc:
            if time.monotonic() + 0.2 > deadline:
                why = f"cannot reach the coordinator at {address} within {timeout:g} s: {reason_of(exc)}"
                raise UsageError(why) from exc
            time.sleep(0.1)
