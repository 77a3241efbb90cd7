"""Compiles C++ once per machine, by a compiler that runs for a bounded time, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from floodplain.memory.native.cache import LibraryCache

logger = logging.getLogger(__name__)

DISABLE_VARIABLE = "FLOODPLAIN_NO_NATIVE_KERNELS"

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


@functools.cache
def load_library(source: Path, fallback: str) -> ctypes.CDLL | None:
    """Compile and load a C++ file; None, with one line in the log that names ``fallback``, if that fails or is off.

    The library is kept under a name that changes with source, flags, compiler and processor. torch must be loaded
    first: OpenMP loops then run on its threads, not on a second pool beside it.
    """
    if os.environ.get(DISABLE_VARIABLE):
        logger.info("%s is off (%s): %s does its work, slower", source.name, DISABLE_VARIABLE, fallback)
        return None
    compiler = _find_compiler()
    if compiler is None:
        wanted = ", ".join(COMPILERS)
        logger.warning("no C++ compiler (%s): %s does the work of %s, slower", wanted, fallback, source.name)
        return None
    try:
        return _load(_find_or_compile(source, compiler))
    except (OSError, CompilerFailed) as error:
        logger.warning("%s cannot be compiled, %s does its work, slower: %s", source.name, fallback, error)
        return None


def _find_or_compile(source: Path, compiler: str) -> bytes:
    name = f"{source.stem}-{_fingerprint(source, compiler)}.so"
    cache = LibraryCache.of_user()
    if cache is None:
        return _compile_library(compiler, source)
    with closing(cache):
        library = cache.load(name)
        if library is None:
            library = _compile_library(compiler, source)
            with suppress(OSError):  # a full disk: the library is used, and compiled again next time
                cache.store(name, library)
    return library


def _load(library: bytes) -> ctypes.CDLL:
    """Load a library from memory: these bytes and no others, also where no folder may hold programs.

    Its descriptor stays open, because dlopen treats a name that it has loaded before as the same library.
    """
    fd = os.memfd_create("floodplain-kernels", os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(library)
        return ctypes.CDLL(f"/proc/self/fd/{fd}")
    except BaseException:
        os.close(fd)
        raise


def _fingerprint(source: Path, compiler: str) -> str:
    facts = (source.read_text(encoding="utf-8"), " ".join(FLAGS), _compiler_version(compiler), _processor())
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=12).hexdigest()


def _processor() -> str:
    """The CPU features that ``-march=native`` depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _find_compiler() -> str | None:
    """The path of the first compiler that is installed; None if there is none."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


@functools.cache
def _compiler_version(compiler: str) -> str:
    """Output of the compiler's ``--version``; raises ``CompilerFailed``."""
    return _run((compiler, "--version"), VERSION_TIMEOUT_S, os.environ)


def _compile_library(compiler: str, source: Path) -> bytes:
    """Bytes of the shared library of ``source``; raises ``CompilerFailed``, ``OSError`` without a temporary folder."""
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
