"""Runs the C++ compiler, for a bounded time."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# What -ffast-math stands for, spelt out: with that flag itself, loading the library would switch the whole process to
# flushing subnormal numbers to zero (GCC bug 55522). The macro lets glibc offer its vector exp.
FAST_MATH = (
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
    "-ffinite-math-only",
    "-D__FAST_MATH__",
)
FLAGS = ("-O3", "-march=native", *FAST_MATH, "-fopenmp", "-fvisibility=hidden", "-std=c++17", "-shared", "-fPIC")
COMPILERS = ("c++", "g++")
COMPILE_TIMEOUT_S = 100.0
VERSION_TIMEOUT_S = 10.0


class CompilerFailed(Exception):
    """The compiler fails, or takes too long. The message is one line."""


def find_compiler() -> str | None:
    """The path of the first compiler that is installed; None if there is none."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


@functools.cache
def compiler_version(compiler: str) -> str:
    """Output of the compiler's ``--version``.

    Raises:
        CompilerFailed: It fails, or takes too long.
    """
    return _run((compiler, "--version"), VERSION_TIMEOUT_S, os.environ)


def compile_library(compiler: str, source: Path) -> bytes:
    """Compile ``source`` to a shared library; returns its bytes.

    Raises:
        CompilerFailed: The compiler fails, or takes too long.
        OSError: There is no folder for temporary files.
    """
    with tempfile.TemporaryDirectory(prefix="floodplain-") as scratch:
        built = Path(scratch) / f"{source.stem}.so"
        command = (compiler, *FLAGS, str(source), "-o", str(built))
        _run(command, COMPILE_TIMEOUT_S, {**os.environ, "TMPDIR": scratch})
        return built.read_bytes()


def _run(command: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> str:
    """Run a command; returns its output. It has a session of its own, so that its children end with it."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=environ, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CompilerFailed(f"{command[0]} does not run: {error.strerror}") from error
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise CompilerFailed(f"{command[0]} was stopped after {timeout_s:g} s") from None
        finally:
            _end_session(process)
    if process.returncode:
        raise CompilerFailed(_first_line(err) or f"{command[0]} ended with status {process.returncode}")
    return out


def _end_session(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "")
