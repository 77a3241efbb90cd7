"""Compiles C++ once per machine and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

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
DISABLE_VARIABLE = "FLOODPLAIN_NO_NATIVE_KERNELS"


@functools.cache
def load_library(source: Path, fallback: str) -> ctypes.CDLL | None:
    """A compiled file of C++; None where there is no compiler, with one line in the log that says so.

    Args:
        source: The file.
        fallback: Who does its work otherwise, for the log.

    The library lies in the user's cache folder under a name that changes with source, flags, compiler and processor.
    torch must be loaded first: OpenMP loops then run on its threads, not on a second pool beside it.
    """
    if os.environ.get(DISABLE_VARIABLE):
        logger.info("%s is off (%s): %s does its work, slower", source.name, DISABLE_VARIABLE, fallback)
        return None
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        wanted = ", ".join(COMPILERS)
        logger.warning("no C++ compiler (%s): %s does the work of %s, slower", wanted, fallback, source.name)
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        logger.warning(
            "%s cannot be compiled, %s does its work, slower: %s", source.name, fallback, _first_line(detail)
        )
        return None


def _compiled(source: Path, compiler: str) -> Path:
    library = _cache_folder() / f"{source.stem}-{_fingerprint(source, compiler)}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, *FLAGS, str(source), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            built.replace(library)  # whole or not at all: several processes may compile at once
    return library


def _fingerprint(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    facts = (source.read_text(encoding="utf-8"), " ".join(FLAGS), version, _processor())
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=12).hexdigest()


def _processor() -> str:
    """What ``-march=native`` depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "floodplain"


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "unknown error")
