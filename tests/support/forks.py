"""Python processes without their imports: forked from a process that has loaded torch and the product, and no thread.

An interpreter takes seconds of CPU to import what a server needs, and a test of processes starts a dozen of them.
Otherwise ``Popen`` equals ``subprocess.Popen``: the process has its own pid, is its caller's child, and has the pipes,
folder, variables, cores and ``sys.path`` of its arguments. So do processes that it starts itself, as a router does.
OpenMP has read its variables before the fork: it computes with one thread.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import re
import runpy
import select
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
_WEB = "floodplain.cli.main pydantic.v1 uvicorn.lifespan.on uvicorn.loops.auto uvicorn.protocols.http.auto"
_ENGINE = """
floodplain.engine.async_engine floodplain.engine.build floodplain.engine.config floodplain.memory.host.backend
floodplain.memory.host.layer_line floodplain.model.attention.cpu floodplain.model.tokenizer_view
floodplain.model.weights.open_model
"""
_INSTANCE = f"""
{_WEB} {_ENGINE} floodplain.cli.instance floodplain.cluster.instance.instance floodplain.cluster.groups.droppable
floodplain.cluster.instance.instance floodplain.cluster.migration.movable floodplain.cluster.launch.parent
floodplain.cluster.instance.stage_member
"""
_SERVE = f"""
{_INSTANCE} floodplain.cli.serve floodplain.cluster.router.engine floodplain.cluster.router.routes
floodplain.cluster.launch.processes floodplain.cluster.router.webhook floodplain.server.app
"""
_LOADED = {
    "serve": _SERVE,
    "instance": _INSTANCE,
    "coordinator": f"{_WEB} floodplain.cli.coordinator floodplain.coordinator.run",
    "leases": "floodplain.cli.main floodplain.cli.leases floodplain.lending.client",
    "tests.chaos.engine": f"{_ENGINE} tests.support.parity tests.support.swapping",
}
"""Modules loaded before a process of a verb or module is forked; it loads all others itself."""
_NAMES_ENGINE = re.compile(r"torch|floodplain\.engine|floodplain\.memory")
"""Code that imports one of these imports most of an engine's modules."""
_PADDING = "x" * 4096
"""Argument of the first process: space for the command lines of its forks."""
_PR_SET_CHILD_SUBREAPER = 36
_Executed = subprocess.Popen  # which a fork patches
_ARGUMENTS = list(inspect.signature(_Executed._execute_child).parameters)[1:]  # type: ignore[attr-defined]


class Popen(subprocess.Popen[Any]):
    """See the module. Programs other than this Python are executed normally."""

    def _execute_child(self, *args: Any) -> None:
        asked = dict(zip(_ARGUMENTS, args, strict=True))
        is_ours = asked["args"][0] == sys.executable and asked["args"][1] in ("-c", "-m")
        if not is_ours or asked["preexec_fn"] or asked["pass_fds"]:
            super()._execute_child(*args)  # type: ignore[misc]
            return
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = [number if end == -1 else end for number, end in enumerate(ends)]
        self.pid = _fork(asked, fds)
        self._child_created = True
        self._close_pipe_fds(*[asked[name] for name in _ARGUMENTS if name.endswith(("read", "write"))])  # type: ignore[attr-defined]


def run(command: Sequence[str], timeout_s: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as ``subprocess.run`` does; return its output."""
    with Popen(command, stdout=-1, stderr=-1, text=True, cwd=ROOT, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


# -- in the process that requests a fork -------------------------------------------------------------------------------

_lock = threading.Lock()
_address: bytes | None = None  # of the process to fork from; its forks inherit it


def _fork(asked: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Return the pid of a new child of this process."""
    request = {
        "command": list(map(os.fspath, asked["args"])),
        "environment": dict(os.environ if asked["env"] is None else asked["env"]),
        "folder": os.fspath(asked["cwd"] or Path.cwd()),
        "is_session": asked["start_new_session"],
        "cores": sorted(os.sched_getaffinity(0)),
        "parent": os.getpid(),
    }
    with _lock, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_address or _start())
        _adopt(True)
        try:
            data = json.dumps(request).encode()
            socket.send_fds(connection, [len(data).to_bytes(4)], list(fds))
            connection.sendall(data)
            said = connection.recv(16)
        finally:
            _adopt(False)
    assert said, "the process that others are forked from is gone"
    return int(said)


def _adopt(yes: bool) -> None:
    """Set whether orphans among this process's descendants become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def _start() -> bytes:
    """Start the first process, which ends with this one; return its address."""
    global _address
    command = [sys.executable, "-c", "from tests.support import forks; forks.main()", _PADDING]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    process = _Executed(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=variables,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    _address = b"\0" + process.stdout.readline().strip().encode()
    atexit.register(process.communicate)  # its standard input ends, and then it exits
    return _address


# -- in a process that others are forked from --------------------------------------------------------------------------


def main() -> None:
    """Fork on request until standard input ends; in a fork, run the requested command."""
    listening = _listen()
    print(listening.getsockname()[1:].decode(), flush=True)
    asked = _serve(listening)
    if asked is not None and "--instances" in asked["command"]:
        asked = _split(asked)
    if asked is not None:
        _end(_run, asked["command"])


def _split(asked: dict[str, Any]) -> dict[str, Any] | None:
    """Continue here as a router; fork a child from which its instances are forked, with the router as their parent."""
    global _address
    listening, (end, _alive) = _listen(), os.pipe()
    _address = listening.getsockname()
    if os.fork():
        listening.close()
        os.close(end)
        subprocess.Popen = Popen  # type: ignore[misc]
        return asked
    for number, fd in enumerate((end, nothing := os.open(os.devnull, os.O_WRONLY), nothing)):
        os.dup2(fd, number)
    for fd in (end, _alive, nothing):
        os.close(fd)
    return _serve(listening)


def _listen() -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("")  # the kernel chooses a name
    listening.listen()
    return listening


def _serve(listening: socket.socket) -> dict[str, Any] | None:
    """Fork on request. Returns the request in a fork; None once standard input has ended."""
    with listening:
        while listening in select.select([listening, 0], [], [])[0]:
            connection, _ = listening.accept()
            with connection:
                head, fds, _, _ = socket.recv_fds(connection, 4, 16)
                with connection.makefile("rb") as reader:
                    asked: dict[str, Any] = json.loads(reader.read(int.from_bytes(head)))
                _load(asked["command"])
                if _is_orphan(asked["parent"]):
                    _wear(asked, fds)
                    connection.sendall(str(os.getpid()).encode())
                    break
                for fd in fds:
                    os.close(fd)
        else:
            return None
    os.closerange(3, 2**20)
    return asked


def _load(command: Sequence[str]) -> None:
    of_code = _ENGINE if command[1] == "-c" and _NAMES_ENGINE.search(command[2]) else ""
    for name in next((_LOADED[word] for word in command[2:4] if word in _LOADED), of_code).split():
        importlib.import_module(name)
    gc.freeze()  # or each fork would collect all of it


def _is_orphan(adopter: int) -> bool:
    """Fork twice; True in a grandchild that ``adopter`` has adopted, False in the caller."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return False
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.0005)
    if os.getppid() != adopter:
        os._exit(1)  # the adopter has exited
    return True


def _wear(request: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Apply everything of the request but its code."""
    if request["is_session"]:
        os.setsid()
    for fd, number in zip(fds, (0, 1, 2), strict=True):
        os.dup2(fd, number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.sched_setaffinity(0, request["cores"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.argv = ["-c", *request["command"][3:]]
    sys.orig_argv = request["command"]
    _show(request["command"])


def _show(command: Sequence[str]) -> None:
    """Make ``/proc`` show this command line."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])
    line = "\0".join([*command, ""]).encode()[: end - start].ljust(end - start, b"\0")
    ctypes.memmove(start, line, len(line))


def _run(command: Sequence[str]) -> None:
    """Run the command as Python does: ``-c`` code, or ``-m`` a module."""
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if command[1] == "-m":
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(command[2], "<string>", "exec"), vars(module))


def _end(work: Callable[..., None], *args: Any) -> NoReturn:
    """Run this and exit as Python does, without tearing down loaded modules, which takes a second."""
    status = 1
    try:
        work(*args)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)
