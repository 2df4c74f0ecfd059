"""Compiles a CUDA source for the CPU with g++, and keeps what it has made for the same text."""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.support.cuda_on_cpu.translation import translate

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
# Qualifiers that mean nothing here. Others are left to the translation.
QUALIFIERS = (
    "__device__",
    "__host__",
    "__forceinline__=inline __attribute__((always_inline))",
    "__grid_constant__",
    "__launch_bounds__(...)",
    "__align__(n)=alignas(n)",
)
DEFINED = [f"-D{name}" if "=" in name else f"-D{name}=" for name in QUALIFIERS]
OPTIONS = [
    "-std=c++20",
    "-Og",
    "-fstack-reuse=none",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-fno-gnu-unique",
    "-fPIC",
    "-w",
]
LANGUAGE = ["-x", "c++"]


def build(
    source: Path, folder: Path, mistakes: Mapping[str, str], macros: Sequence[str] = (), only: str | None = None
) -> ctypes.CDLL:
    """folder: where libraries are kept, by their text. mistakes: what to write instead of texts that stand there once.
    macros: those that are defined. only: the kernel that is compiled; else all are.

    Processes that build the same one at once do so for themselves. Raises RuntimeError with the compiler's errors.
    """
    text = _output(["-E", *LANGUAGE, *DEFINED, *(f"-D{macro}" for macro in macros), str(source)])
    for right, wrong in mistakes.items():
        if text.count(right) != 1:
            raise ValueError(f"{source.name} and its headers have {text.count(right)} times: {right}")
        text = text.replace(right, wrong)
    text = translate(text, only)
    library = folder / f"{source.stem}-{_key(text, _model())}.so"
    if not library.exists():
        model = _precompiled_model(folder)
        _write(library, [*LANGUAGE, f"-I{model}", f"-I{HERE}", "-shared", "-"], text)
    return ctypes.CDLL(str(library))


@cache
def _precompiled_model(folder: Path) -> Path:
    """A folder with the model's headers, parsed: to read them takes half of a small source's time."""
    made = folder / f"model-{_key(_model())}"
    made.mkdir(exist_ok=True)
    # All processes of a run need it at once, and it takes as long as a source.
    with (made / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "launch.h.gch").exists():
            _write(made / "launch.h.gch", ["-x", "c++-header", str(HERE / "launch.h")])
    return made


def _write(path: Path, arguments: list[str], given: str = "") -> None:
    """Another process may make the same file meanwhile."""
    own = path.with_suffix(f".{os.getpid()}")
    _output([*OPTIONS, *arguments, "-o", str(own)], given)
    own.rename(path)


def _key(*texts: str) -> str:
    return hashlib.sha256("\0".join((*texts, *OPTIONS, _version())).encode()).hexdigest()[:24]


@cache
def _version() -> str:
    return _output(["-dumpfullversion", "-dumpmachine"])


@cache
def _model() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.h")))


def _output(arguments: list[str], given: str = "") -> str:
    assert COMPILER is not None, "there is no g++"
    done = subprocess.run([COMPILER, *arguments], input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ does not compile it, perhaps since something is not modelled:\n{done.stderr}")
    return done.stdout
