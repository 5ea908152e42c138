"""A Slurm of this machine alone, from Debian's slurm-wlm and munge, in a temporary folder: its own key, ports, state and logs."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from waiting import PATIENCE, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
CPUS = 8
"""More than the machine may have: elements of tests sleep most of the time."""

CONF = """
ClusterName=actshard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=2
DefMemPerCPU=500
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=16000 Gres=gpu:2 State=UNKNOWN
PartitionName=cpu Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def ask(*words: str) -> str:
    """Output of a program of Slurm."""
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout


@contextlib.contextmanager
def cluster() -> Iterator[Path]:
    """Starts a cluster, and ends every process of it. Its programs find it by ``SLURM_CONF``, which is set meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket has at most 107 characters
    started: list[subprocess.Popen[bytes]] = []
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    os.environ.update(SLURM_CONF=str(folder / "slurm.conf"), PATH=_path())
    try:
        _configure(folder)
        for words, ready in (
            (_munged(folder), (folder / "munge/socket").exists),
            (["slurmctld", "-D", "-c"], _answers),
            (["slurmd", "-D"], _is_idle),
        ):
            with (folder / f"{words[0]}.out").open("wb") as out:
                started.append(
                    subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
                )
            wait_until(lambda: ready() or started[-1].poll() is not None, words[0])  # noqa: B023 -- called before the next round
            assert started[-1].poll() is None, (folder / f"{words[0]}.out").read_text()
        yield folder
        subprocess.run(["scancel", "--user", getpass.getuser()], check=False, timeout=PATIENCE)
        wait_until(lambda: not ask("squeue", "--noheader"), "jobs to end")
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _end_what_is_left(folder)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> None:
    host = socket.gethostname().partition(".")[0]
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        controller, daemon = (each.getsockname()[1] for each in held)
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "munge/key").write_bytes(os.urandom(1024))
    (folder / "munge/key").chmod(0o600)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "slurm.conf").write_text(
        CONF.format(host=host, controller=controller, daemon=daemon, user=getpass.getuser(), folder=folder, cpus=CPUS)
    )


def _munged(folder: Path) -> list[str]:
    places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return ["munged", "--foreground", "--force", *(f"--{n}={folder}/munge/{at}" for n, at in places.items())]


def _answers() -> bool:
    return subprocess.run(["scontrol", "ping"], capture_output=True, timeout=PATIENCE, check=False).returncode == 0


def _is_idle() -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return done.stdout.strip() == "idle"


def _end_what_is_left(folder: Path) -> None:
    """Kills processes of jobs that their daemon did not end: those with this cluster's SLURM_CONF."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
