"""Runs commands of ``actshard`` and scripts in processes of their own, without starting an interpreter for each.

One process per test process imports the command line once and forks for each command: a command costs hundredths of a second
instead of a second. Use a real process where the start itself, imports, memory, signals or pipes are tested.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

from waiting import PATIENCE

IMPORTED = (
    "pyarrow.compute",
    "pyarrow.parquet",
    "typer._adapters",
    "actshard.cli",
    "actshard.formats",
    "actshard.reading.verifying",
    "actshard.looking.stats",
)


def run_command(*words: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The status and the outputs of ``actshard WORDS``, with Python's own warnings off.

    Args:
        words: arguments of the command; paths become texts.
        cwd: the current folder of the command.
        environment: variables that are added to those of this process. Those that Python reads when it starts have no effect.
    """
    return _run(["actshard", *map(str, words)], None, cwd, environment)


def run_script(script: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The status and the outputs of ``python -W ignore -c SCRIPT WORDS``. numpy, pyarrow and actshard are already imported."""
    return _run(["-c", *map(str, words)], script, None, environment)


def _run(
    arguments: list[str], script: str | None, cwd: Path | None, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        request = {
            "arguments": arguments,
            "script": script,
            "environment": {**os.environ, **environment},
            "cwd": str(cwd or Path.cwd()),
            "outputs": [out.name, err.name],
        }
        if _server().poll() is not None:  # a test killed it, or the system did
            _server.cache_clear()
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        # Not select(), which refuses descriptors above 1,023.
        waiting = select.poll()
        waiting.register(server.stdout, select.POLLIN)
        answer = server.stdout.readline() if waiting.poll(PATIENCE * 1000) else ""
        if not answer:
            _kill(server)
            _server.cache_clear()
            raise AssertionError(f"{' '.join(arguments)}: no end within {PATIENCE} s, or its server died")
        status, seconds = json.loads(answer)
        _seconds.append(seconds)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, status, *texts)


_seconds: list[float] = []


def spent_seconds() -> float:
    """Processor time of all commands of this process, which are not its children."""
    return sum(_seconds)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks. It ends when its stdin is closed, so also with a killed test process."""
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(_kill, server)
    return server


def _kill(server: subprocess.Popen[str]) -> None:
    """Kills the server, and a command that does not end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _serve() -> dict[str, Any] | None:
    """Forks for each request; returns it in the child. None at the end of the test process."""
    # What each command would import again.
    for name in IMPORTED:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{name}."):
            if not module.name.endswith(".__main__"):
                with contextlib.suppress(ModuleNotFoundError):  # a codec of zarr-python, which may not be installed
                    importlib.import_module(module.name)
    gc.freeze()  # children share this memory
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            return request
        _, ending, usage = os.wait4(child, 0)
        answers.write(f"{json.dumps([os.waitstatus_to_exitcode(ending), usage.ru_utime + usage.ru_stime])}\n")
        answers.flush()
    return None


def _become(request: dict[str, Any]) -> None:
    """Turns this forked process into the command or the script. Python then ends it as any other process."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    for number, path in enumerate((os.devnull, *request["outputs"])):
        descriptor = os.open(path, os.O_RDWR)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = request["arguments"]
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace")
    sys.warnoptions[:] = ["ignore"]  # as with -W ignore
    warnings.simplefilter("ignore")
    if request["script"] is None:
        from actshard.cli import main

        main()
    else:
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(request["script"], "<string>", "exec"), vars(module))


if __name__ == "__main__" and (request := _serve()) is not None:
    _become(request)
