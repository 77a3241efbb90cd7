"""Compiles C++ once per machine, keeps the library in a folder that only this user can change, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Self

from floodplain.files.reading import user_folder

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

_MAGIC = b"floodplain library 1"
_DIGEST_BYTES = 32
_MAX_BYTES = 2**26
_OTHERS_WRITE = 0o022


class CompilerFailed(Exception):
    """The compiler fails, or takes too long. The message is one line."""


@functools.cache
def load_library(source: Path, fallback: str) -> ctypes.CDLL | None:
    """Compile and load a C++ file; None, with one line in the log that names ``fallback``, if that fails or is off.

    torch must be loaded first: OpenMP loops then run on its threads, not on a second pool beside it.
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
            logger.info("compiling %s, once for this processor", source.name)
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
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


@functools.cache
def _compiler_version(compiler: str) -> str:
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


class LibraryCache:
    """A folder of libraries, made if missing and held open; ``OSError`` if it is a link, or others may change it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not _is_ours(os.fstat(self._fd)):
            os.close(self._fd)
            raise PermissionError(f"{folder} belongs to another user, or others may write there")

    @classmethod
    def of_user(cls) -> Self | None:
        """The cache in the user's cache folder or the temporary folder; None, with a line in the log, if in neither."""
        refusals = []
        for folder in _candidates():
            try:
                return cls(folder)
            except OSError as error:
                refusals.append(str(error))
        logger.warning("compiled kernels are not kept (set XDG_CACHE_HOME to a folder): %s", "; ".join(refusals))
        return None

    def load(self, name: str) -> bytes | None:
        """The library stored as ``name``; None if it is missing, cut, changed, or not this user's alone."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not (stat.S_ISREG(info.st_mode) and _is_ours(info) and info.st_size <= _MAX_BYTES):
                return None
            content = file.read()
        library, seal = content[: -len(_MAGIC) - _DIGEST_BYTES], content[-len(_MAGIC) - _DIGEST_BYTES :]
        return library if seal == _seal(library) else None

    def store(self, name: str, library: bytes) -> None:
        """Keep ``library`` as ``name``, whole or not at all; replaces what is there. Raises ``OSError``."""
        scratch = f".{name}.{secrets.token_hex(8)}"
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(library + _seal(library))
                file.flush()
                os.fsync(fd)
            os.replace(scratch, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            os.unlink(scratch, dir_fd=self._fd)
            raise

    def close(self) -> None:
        """Close the folder."""
        os.close(self._fd)


def _candidates() -> Iterator[Path]:
    root = user_folder("XDG_CACHE_HOME", ".cache")
    if root is not None:
        yield root / "floodplain"
    yield Path(tempfile.gettempdir()) / f"floodplain-{os.geteuid()}"


def _is_ours(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid() and not info.st_mode & _OTHERS_WRITE


def _seal(library: bytes) -> bytes:
    return _MAGIC + hashlib.blake2b(library, digest_size=_DIGEST_BYTES).digest()
