"""What the facts about a host mean for a job: ok, a warning, or an error, with the mend. Pure.

An error is what makes a job fail here. A warning is what may fail later, or is slower than it could be. A check that
does not apply to this host says so. `None` in a fact means that it could not be read.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30
MEMFD_BYTES = 16 * MIB  # as the slab of 64 blocks of 256 KiB, which a gradient bucket takes

_PYTHONS = ((3, 10), (3, 13))
_TORCH = (2, 13)  # the least; also the one of constraints.txt, with which the tests run
_TORCHFT = (0, 2)
# Descriptors of one process, measured in jobs of one to four ranks on one host. The agent had 21 + 9 for each of its
# ranks. A comm process had 22 + 3 for each peer, one for each group that spans all ranks; axes add at most as many
# again as one such group.
_AGENT_FILES, _FILES_OF_A_LOCAL_RANK = 32, 9
_COMM_FILES, _FILES_OF_A_PEER = 32, 4
FILES_OF_A_SCRIPT = 256
# Threads: a rank had 7, its comm process 15, its standby 3; the agent 5 and one for each rank.
_HOST_THREADS, _THREADS_OF_A_RANK = 32, 32
_SHM_OF_A_RANK = 64 * MIB
_MIN_PORTS = 1000
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")  # a read is a system call of about 1 us or more
_MAX_RESOLUTION_S = 1e-3
_SLOW_LOOKUP_S = 1.0
_SLOW_CONNECT_S = 0.2
_MIN_CHECKPOINT_BYTES = 10 * GIB
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    NOT_APPLICABLE = "n/a"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `mend`: what to do about a warning or an error; empty otherwise."""

    check: str
    level: Level
    text: str
    mend: str = ""


@dataclass(frozen=True)
class Job:
    """The job that the host is to run: ranks on this host, and on all hosts together."""

    num_local_ranks: int
    num_ranks: int

    @property
    def num_files(self) -> int:
        """The open files that the limit must allow a single process: the agent, or a comm process."""
        agent = _AGENT_FILES + _FILES_OF_A_LOCAL_RANK * self.num_local_ranks
        comm = _COMM_FILES + _FILES_OF_A_PEER * self.num_ranks
        return max(agent, comm) + FILES_OF_A_SCRIPT

    @property
    def num_threads(self) -> int:
        """Threads on this host, without those that the script starts."""
        return _HOST_THREADS + _THREADS_OF_A_RANK * self.num_local_ranks


@dataclass(frozen=True)
class Cuda:
    """`driver`, `built`: the versions of CUDA that the driver supports and that torch was built with. `nccl`,
    `nccl_pin`: the loaded version of NCCL, and the one that torch's wheel requires. `compute_modes`: by device.
    `no_peers`: the pairs of devices that cannot access each other's memory."""

    num_devices: int
    driver: tuple[int, ...] | None
    built: tuple[int, ...]
    nccl: tuple[int, ...] | None
    nccl_pin: tuple[int, ...] | None
    compute_modes: Sequence[int] | None
    no_peers: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Torch:
    """`error`: why torch cannot be imported; the other fields are then empty. `cuda`: None for a build without it."""

    version: str
    has_gloo: bool
    cuda: Cuda | None
    error: str = ""


@dataclass(frozen=True)
class Disk:
    """A directory to which a file was written. `error`: why that failed; empty if it did not."""

    path: str
    free_bytes: int
    error: str = ""


@dataclass(frozen=True)
class Limits:
    """`soft`, `hard`: None for no limit. `used`: what counts against it now."""

    soft: int | None
    hard: int | None
    used: int = 0


@dataclass(frozen=True)
class Coordinator:
    """An attempt to connect. `error`: empty if it succeeded, within `seconds`."""

    address: str
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """Errors are texts, empty for none. `has_nvidia`: the kernel has a driver of NVIDIA. `port_error`: why nothing can
    listen at the coordinator's default `port`. `lookup_s`: how long this host's own name takes to resolve.
    `checkpoints`: a URL was not tried."""

    python: tuple[int, int]
    torch: Torch
    torchft: str | None
    has_nvidia: bool
    pidfd_error: str
    memfd_error: str
    shm: Disk
    files: Limits
    processes: Limits
    container_processes: Limits
    loopback_error: str
    port: int
    port_error: str
    num_ports: int | None
    host_name: str
    lookup_s: float | None
    resolution_s: float
    clock: str | None
    py_spy: str | None
    temporary: Disk
    run_dir: Disk
    checkpoints: Disk | str | None
    coordinator: Coordinator | None


def judge(facts: Facts, job: Job) -> list[Finding]:
    """One finding for each check, in the order of the report."""
    return [
        _python(facts.python),
        _torch(facts.torch),
        _torchft(facts.torchft),
        *_cuda(facts),
        _pidfd(facts.pidfd_error),
        _memfd(facts.memfd_error),
        _shm(facts.shm, job),
        _files(facts.files, job),
        _processes(facts, job),
        _loopback(facts.loopback_error),
        _port(facts.port, facts.port_error),
        _ports(facts.num_ports),
        _host_name(facts.host_name, facts.lookup_s),
        _clock(facts.resolution_s, facts.clock),
        _py_spy(facts.py_spy),
        _directory("TMPDIR", facts.temporary, "torch.compile and the script may need it"),
        _directory(
            "run directory", facts.run_dir, "`elasticgang status` finds no job without it", "ELASTICGANG_RUN_DIR"
        ),
        _checkpoints(facts.checkpoints),
        _coordinator(facts.coordinator),
    ]


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if there is an error, 0 otherwise."""
    return int(any(finding.level is Level.ERROR for finding in findings))


def lines_of(findings: Sequence[Finding]) -> Iterator[str]:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        yield f"{finding.level.value:<8} {finding.check:<{width}}  {finding.text}"
        if finding.mend:
            yield f"{'':<8} {'':<{width}}  mend: {finding.mend}"


def as_json(findings: Sequence[Finding]) -> Mapping[str, object]:
    checks = [{**dataclasses.asdict(finding), "level": finding.level.value} for finding in findings]
    return {"checks": checks, "exit_code": exit_code(findings)}


def version_of(text: str) -> tuple[int, ...]:
    """The leading numbers: (2, 13, 0) of "2.13.0+cpu"."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _python(version: tuple[int, int]) -> Finding:
    text = ".".join(map(str, version))
    if _PYTHONS[0] <= version <= _PYTHONS[1]:
        return Finding("Python", Level.OK, text)
    return Finding("Python", Level.ERROR, f"{text} is not supported", "Use Python 3.10 to 3.13.")


def _torch(torch: Torch) -> Finding:
    if torch.error:
        return Finding("torch", Level.ERROR, f"cannot be imported: {torch.error}", "Install it: pip install torch.")
    version = version_of(torch.version)
    if version[:2] < _TORCH:
        return Finding("torch", Level.ERROR, f"{torch.version} is too old", "Install torch 2.13 or newer.")
    if not torch.has_gloo:
        return Finding(
            "torch", Level.ERROR, f"{torch.version} was built without Gloo, which votes use", "Install a wheel of PyPI."
        )
    if version[:2] != _TORCH:
        text = f"{torch.version}: the tests of elasticgang run with 2.13"
        return Finding("torch", Level.WARNING, text, "Install with -c constraints.txt, or run its tests here.")
    return Finding("torch", Level.OK, torch.version)


def _torchft(version: str | None) -> Finding:
    if version is None:
        return Finding("torchft", Level.ERROR, "is not installed", "Install it: pip install torchft.")
    if version_of(version)[:2] < _TORCHFT:
        return Finding("torchft", Level.ERROR, f"{version} is too old", "Install torchft 0.2 or newer.")
    if version_of(version)[:2] != _TORCHFT:
        text = f"{version}: the tests of elasticgang run with 0.2"
        return Finding("torchft", Level.WARNING, text, "Install with -c constraints.txt.")
    return Finding("torchft", Level.OK, version)


def _cuda(facts: Facts) -> Iterator[Finding]:
    checks = ["CUDA driver", "NCCL", "compute mode", "peer access"]
    cuda = facts.torch.cuda
    if facts.torch.error:
        yield from (Finding(check, Level.NOT_APPLICABLE, "torch cannot be imported") for check in checks)
        return
    if cuda is None:
        if facts.has_nvidia:
            text = "this host has a driver of NVIDIA, but torch was built without CUDA"
            yield Finding(checks[0], Level.WARNING, text, "Install torch with CUDA, or train on the CPU.")
            checks = checks[1:]
        yield from (Finding(check, Level.NOT_APPLICABLE, "torch has no CUDA") for check in checks)
        return
    if not facts.has_nvidia and cuda.driver is None:
        text = "this host has no driver of NVIDIA"
        yield from (Finding(check, Level.NOT_APPLICABLE, text) for check in checks)
        return
    yield _driver(cuda)
    if not cuda.num_devices:
        yield from (Finding(check, Level.NOT_APPLICABLE, "torch sees no device") for check in checks[1:])
        return
    yield _nccl(cuda)
    yield _compute_mode(cuda.compute_modes)
    yield _peer_access(cuda)


def _driver(cuda: Cuda) -> Finding:
    built = _dotted(cuda.built)
    if cuda.driver is None:
        text = "the driver's library, libcuda.so.1, cannot be loaded"
        return Finding("CUDA driver", Level.ERROR, text, "In a container, start it with --gpus all.")
    text = f"supports CUDA {_dotted(cuda.driver)}, torch was built with {built}"
    if cuda.driver[:1] < cuda.built[:1]:
        mend = f"Update the driver, or install a torch that was built with CUDA {cuda.driver[0]}."
        return Finding("CUDA driver", Level.ERROR, text, mend)
    if not cuda.num_devices:
        mend = "Look at CUDA_VISIBLE_DEVICES and nvidia-smi; in a container, start it with --gpus all."
        return Finding("CUDA driver", Level.ERROR, f"{text}, but torch sees no device", mend)
    return Finding("CUDA driver", Level.OK, f"{text}, {cuda.num_devices} devices")


def _nccl(cuda: Cuda) -> Finding:
    if cuda.nccl is None:
        mend = "Install a wheel of PyPI, or use --process-group isolated-gloo."
        return Finding("NCCL", Level.WARNING, "torch was built without it", mend)
    text = _dotted(cuda.nccl)
    if cuda.nccl_pin is not None and cuda.nccl_pin[:2] != cuda.nccl[:2]:
        mend = "Another libnccl.so.2 is found first: look at LD_LIBRARY_PATH and LD_PRELOAD."
        return Finding("NCCL", Level.WARNING, f"{text} is loaded, but torch requires {_dotted(cuda.nccl_pin)}", mend)
    return Finding("NCCL", Level.OK, text)


def _compute_mode(modes: Sequence[int] | None) -> Finding:
    if modes is None:
        return Finding("compute mode", Level.WARNING, "cannot be read", "Look at `nvidia-smi -q -d COMPUTE`.")
    named = [f"device {number}: {_COMPUTE_MODES.get(mode, mode)}" for number, mode in enumerate(modes) if mode]
    if not named:
        return Finding("compute mode", Level.OK, "default")
    mend = "Set it to the default: nvidia-smi -c DEFAULT."
    if 2 in modes:
        return Finding("compute mode", Level.ERROR, "; ".join(named), mend)
    text = f"{'; '.join(named)}: isolated-nccl needs a second process on the device, a restart the end of the first"
    return Finding("compute mode", Level.WARNING, text, mend)


def _peer_access(cuda: Cuda) -> Finding:
    if cuda.num_devices < 2:
        return Finding("peer access", Level.NOT_APPLICABLE, "there is one device")
    if cuda.no_peers:
        pairs = ", ".join(f"{one}-{other}" for one, other in cuda.no_peers)
        mend = "Look at `nvidia-smi topo -p2p r`, the IOMMU and ACS: without it, data goes through host memory."
        return Finding("peer access", Level.WARNING, f"not between devices {pairs}", mend)
    return Finding("peer access", Level.OK, f"between all {cuda.num_devices} devices")


def _pidfd(error: str) -> Finding:
    if error:
        mend = "Use Linux 5.3 or newer, and a seccomp profile that allows pidfd_open."
        return Finding("pidfd", Level.ERROR, f"agents watch ranks by pidfds, but: {error}", mend)
    return Finding("pidfd", Level.OK, "works")


def _memfd(error: str) -> Finding:
    size = f"{MEMFD_BYTES // MIB} MiB"
    if error:
        mend = "Allow memfd_create in the seccomp profile, and give the container more memory."
        return Finding("memfd", Level.ERROR, f"a sealed memfd of {size} cannot be made: {error}", mend)
    return Finding("memfd", Level.OK, f"a sealed memfd of {size} can be made")


def _shm(shm: Disk, job: Job) -> Finding:
    """elasticgang's own shared memory is memfds. Data workers of torch and NCCL use /dev/shm."""
    mend = "Start the container with --shm-size, or remount it: mount -o remount,size=50% /dev/shm."
    if shm.error:
        return Finding("/dev/shm", Level.WARNING, f"data workers and NCCL need it, but: {shm.error}", mend)
    needed = _SHM_OF_A_RANK * job.num_local_ranks
    text = f"{_size(shm.free_bytes)} free"
    if shm.free_bytes < needed:
        return Finding("/dev/shm", Level.WARNING, f"{text}; data workers and NCCL may need {_size(needed)}", mend)
    return Finding("/dev/shm", Level.OK, text)


def _files(files: Limits, job: Job) -> Finding:
    needed = job.num_files
    what = (
        f"{job.num_local_ranks} ranks here of {job.num_ranks} need {needed} in one process, with {FILES_OF_A_SCRIPT} "
        "for the script"
    )
    if files.soft is None or files.soft >= needed:
        return Finding("open files", Level.OK, f"{_limit(files.soft)}; {what}")
    mend = f"ulimit -n {needed}"
    if files.hard is not None and files.hard < needed:
        mend = (
            f"The hard limit is {files.hard}: raise it in limits.conf or LimitNOFILE, or start the container with "
            f"--ulimit nofile={needed}."
        )
    level = Level.ERROR if files.soft < needed - FILES_OF_A_SCRIPT else Level.WARNING
    return Finding("open files", level, f"{files.soft}; {what}", mend)


def _processes(facts: Facts, job: Job) -> Finding:
    needed = job.num_threads
    of_user, of_container = facts.processes, facts.container_processes
    free = [limits.soft - limits.used for limits in (of_user, of_container) if limits.soft is not None]
    room = f"{min(free)} more threads are allowed" if free else "no limit"
    text = f"{room}; {job.num_local_ranks} ranks need {needed}, and the script its own"
    if min(free, default=needed) >= needed:
        return Finding("processes", Level.OK, text)
    is_container = of_container.soft is not None and of_container.soft - of_container.used < needed
    mend = "Start the container with --pids-limit -1." if is_container else "Raise `ulimit -u`."
    return Finding("processes", Level.ERROR, text, mend)


def _loopback(error: str) -> Finding:
    if error:
        mend = "In a network namespace of its own: ip link set lo up."
        return Finding("loopback", Level.ERROR, f"nothing can connect to 127.0.0.1: {error}", mend)
    return Finding("loopback", Level.OK, "listens and connects")


def _port(port: int, error: str) -> Finding:
    if error:
        text = f"a coordinator cannot listen on port {port}, its default: {error}"
        return Finding("default port", Level.WARNING, text, "Give `elasticgang coordinator` another --port.")
    return Finding("default port", Level.OK, f"{port} is free")


def _ports(number: int | None) -> Finding:
    if number is None:
        return Finding("ports", Level.WARNING, "their range cannot be read", "Look at net.ipv4.ip_local_port_range.")
    if number < _MIN_PORTS:
        mend = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        return Finding("ports", Level.WARNING, f"{number} for connections; a job may need {_MIN_PORTS}", mend)
    return Finding("ports", Level.OK, f"{number} for connections")


def _host_name(name: str, lookup_s: float | None) -> Finding:
    mend = f"Add {name} to /etc/hosts, with an address that the other hosts reach."
    if lookup_s is None:
        return Finding("host name", Level.WARNING, f"{name} cannot be resolved", mend)
    if lookup_s > _SLOW_LOOKUP_S:
        text = f"{name} takes {lookup_s:.1f} s to resolve, which every rendezvous may wait for"
        return Finding("host name", Level.WARNING, text, mend)
    return Finding("host name", Level.OK, f"{name} is resolved")


def _clock(resolution_s: float, source: str | None) -> Finding:
    """Every deadline and lease is measured by clocks of one host that nobody sets."""
    text = f"monotonic, resolution {resolution_s * 1e9:g} ns, source {source or 'unknown'}"
    if resolution_s > _MAX_RESOLUTION_S:
        mend = "Leases need 1 ms or better: use a kernel with high-resolution timers."
        return Finding("clock", Level.ERROR, text, mend)
    if source in _SLOW_CLOCKS:
        mend = "Boot with clocksource=tsc, or use the clock of the hypervisor."
        return Finding("clock", Level.WARNING, f"{text}, which is slow to read", mend)
    return Finding("clock", Level.OK, text)


def _py_spy(path: str | None) -> Finding:
    missing = "not installed; it is optional: faulthandler reads the stacks of hung ranks"
    return Finding("py-spy", Level.OK, path or missing)


def _directory(what: str, disk: Disk, needs: str, variable: str = "TMPDIR") -> Finding:
    """One without which a job runs all the same. `needs`: what else does not."""
    if disk.error:
        mend = f"Free some space, allow to write, or name another by the variable {variable}."
        return Finding(what, Level.WARNING, f"{disk.path}: {disk.error}; {needs}", mend)
    return Finding(what, Level.OK, f"{disk.path}, {_size(disk.free_bytes)} free")


def _checkpoints(disk: Disk | str | None) -> Finding:
    if isinstance(disk, str):
        return Finding("checkpoints", Level.NOT_APPLICABLE, f"{disk} is a URL: try `elasticgang checkpoints {disk}`")
    if disk is None:
        return Finding("checkpoints", Level.NOT_APPLICABLE, "no --checkpoint-dir was given")
    if disk.error:
        mend = "Give a directory that every host shares and may write to."
        return Finding("checkpoints", Level.ERROR, f"{disk.path}: {disk.error}", mend)
    text = f"{disk.path}, {_size(disk.free_bytes)} free"
    if disk.free_bytes < _MIN_CHECKPOINT_BYTES:
        mend = "A save takes the size of the training state; keep=N keeps N of them. Free some space."
        return Finding("checkpoints", Level.WARNING, text, mend)
    return Finding("checkpoints", Level.OK, text)


def _coordinator(coordinator: Coordinator | None) -> Finding:
    if coordinator is None:
        return Finding("coordinator", Level.NOT_APPLICABLE, "no --coordinator was given")
    if coordinator.error:
        mend = "Start it: `elasticgang coordinator --host HOST --port PORT`; look at the address and the firewall."
        return Finding("coordinator", Level.ERROR, f"{coordinator.address}: {coordinator.error}", mend)
    text = f"{coordinator.address} accepts connections, in {1000 * coordinator.seconds:.1f} ms"
    if coordinator.seconds > _SLOW_CONNECT_S:
        return Finding("coordinator", Level.WARNING, text, "Run it nearer: each generation change waits for it.")
    return Finding("coordinator", Level.OK, text)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _limit(number: int | None) -> str:
    return "no limit" if number is None else str(number)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
