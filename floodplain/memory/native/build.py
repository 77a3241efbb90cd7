"""Compiles C++ once per machine and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
from contextlib import closing, suppress
from pathlib import Path

from floodplain.memory.native.cache import LibraryCache
from floodplain.memory.native.compiler import (
    COMPILERS,
    FLAGS,
    CompilerFailed,
    compile_library,
    compiler_version,
    find_compiler,
)

logger = logging.getLogger(__name__)

DISABLE_VARIABLE = "FLOODPLAIN_NO_NATIVE_KERNELS"


@functools.cache
def load_library(source: Path, fallback: str) -> ctypes.CDLL | None:
    """Compile and load a C++ file; None, with one line in the log that says why, if that fails or is off.

    Args:
        source: The file.
        fallback: Name of what does its work otherwise, for the log.

    The library is kept under a name that changes with source, flags, compiler and processor (see ``LibraryCache``).
    torch must be loaded first: OpenMP loops then run on its threads, not on a second pool beside it.
    """
    if os.environ.get(DISABLE_VARIABLE):
        logger.info("%s is off (%s): %s does its work, slower", source.name, DISABLE_VARIABLE, fallback)
        return None
    compiler = find_compiler()
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
        return compile_library(compiler, source)
    with closing(cache):
        library = cache.load(name)
        if library is None:
            library = compile_library(compiler, source)
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
    facts = (source.read_text(encoding="utf-8"), " ".join(FLAGS), compiler_version(compiler), _processor())
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=12).hexdigest()


def _processor() -> str:
    """The CPU features that ``-march=native`` depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
