"""The CUDA sources compile for Hopper as they are meant to, and agree with the modules that launch them.

NVRTC compiles without a device.
"""

import ctypes
import hashlib
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from kernels import __file__ as package

KERNELS = Path(package).parent
SOURCES = sorted(KERNELS.glob("*/cuda/*.cu"))
OWN_COMPILING, TARGET = KERNELS / "nvrtc.py", "sm_90a"
# Little is optimized, but everything checked and assembled, in a third of the time.
QUICKLY = ("--Ofast-compile=max",)
# Those that `make test` optimizes, because it looks at their code: FP8 and bf16 products of many rows, scores, and
# attention.
OPTIMIZED = {"fp8_gemm-many_rows", "grouped_gemm-many_rows", "index_scores-scores", "mla_selected-fp8_selected"}
# The compiler's log has this where it waits after every product.
WAITING = "serialized"


def has_nvrtc() -> bool:
    try:
        import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except (ImportError, RuntimeError):
        return False
    return True


def name_of(source: Path) -> str:
    return f"{source.parts[-3]}-{source.stem}"


def parameter(source: Path) -> Any:
    """Tests of the same source run in the same process, so that it is compiled once."""
    return pytest.param(source, id=name_of(source), marks=pytest.mark.xdist_group(f"compile {name_of(source)}"))


pytestmark = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC (nvidia-cuda-nvrtc)")
by_source = pytest.mark.parametrize("source", [parameter(source) for source in SOURCES])


class Compiled(msgspec.Struct):
    key: bytes
    code: bytes
    log: str


def compile_with_launchers(source: Path, folder: Path) -> Compiled:
    """The source with static assertions of the values that its launchers repeat, compiled quickly unless its code is
    looked at.

    Takes what an earlier test, or an earlier run, has made of the same text.
    """
    launchers = find_launchers(source)
    assert launchers, "no module launches it"
    stated = {line for module in launchers for line in (*layouts(module, source), *constants(module, source))}
    asserted = "\n".join([f'#include "{source}"', *(f"static_assert({line});" for line in sorted(stated))])
    version = import_module("cuda.bindings.nvrtc").nvrtcVersion()
    options = () if name_of(source) in OPTIMIZED else QUICKLY
    text = "\n".join([str(version), TARGET, *options, OWN_COMPILING.read_text(), asserted, with_includes(source)])
    kept, key = folder / f"{name_of(source)}.msgpack", hashlib.sha256(text.encode()).digest()
    if kept.exists() and (earlier := msgspec.msgpack.decode(kept.read_bytes(), type=Compiled)).key == key:
        return earlier
    made = compile_now(asserted, kept.with_suffix(".cu"), options)
    found = Compiled(key, made.code, made.log)
    write_whole(kept, msgspec.msgpack.encode(found))
    return found


def compile_now(text: str, program: Path, options: tuple[str, ...] = ()) -> Any:
    """kernels.nvrtc.Compiled"""
    program.write_text(text, encoding="utf-8")
    return import_module("kernels.nvrtc").compile_source(program, TARGET, options=options)


def write_whole(path: Path, content: bytes) -> None:
    """Another process may read the file meanwhile: it finds all of it, or what was there before."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(content)
    new.rename(path)


def find_launchers(source: Path) -> list[ModuleType]:
    """The modules of the operation that launch this source: they name its file, or its list of sources does."""
    operation = source.parent.parent
    texts = {path.stem: path.read_text() for path in operation.glob("*.py")}
    naming = {stem for stem, text in texts.items() if f'"{source.name}"' in text}
    if "sources" in naming:
        listed = f"from kernels.{operation.name}.sources import"
        naming |= {stem for stem, text in texts.items() if listed in text and "load_kernel" in text}
    return [import_module(f"kernels.{operation.name}.{stem}") for stem in naming - {"sources"}]


def layouts(module: ModuleType, source: Path) -> Iterator[str]:
    """The size of each argument structure that module and source have, and the offset and size of each field."""
    text = with_includes(source)
    for structure in vars(module).values():
        if isinstance(structure, type) and issubclass(structure, ctypes.Structure):
            name = structure.__name__
            if not re.search(rf"^struct (alignas\(\d+\) )?{name} ", text, re.MULTILINE):
                continue
            yield f"sizeof({name}) == {ctypes.sizeof(structure)}"
            for field in (field for field, *_ in structure._fields_ if field != "_tail"):
                place = getattr(structure, field)
                # NVRTC has no offsetof.
                yield f"__INTADDR__(&(({name}*)0)->{field}) == {place.offset}"
                yield f"sizeof({name}::{field}) == {place.size}"


def constants(module: ModuleType, source: Path) -> Iterator[str]:
    """The integer constants that module and source have under the same name."""
    text = with_includes(source)
    for name, value in vars(module).items():
        if isinstance(value, int) and re.search(rf"^constexpr int [^;]*\b{name} = ", text, re.MULTILINE):
            yield f"{name} == {value}"


def with_includes(source: Path) -> str:
    text = source.read_text(encoding="utf-8")
    included = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
    return "\n".join([text, *(with_includes(source.parent / name) for name in included)])


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled sources are kept: in pytest's cache, which all processes of a run and later runs share."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("cuda") if cache is None else cache.mkdir("cuda")


@by_source
def test_a_source_agrees_with_its_launchers(source: Path, folder: Path) -> None:
    assert compile_with_launchers(source, folder).code


@pytest.mark.parametrize("source", [parameter(each) for each in SOURCES if name_of(each) in OPTIMIZED])
def test_products_stay_in_flight(source: Path, folder: Path) -> None:
    assert WAITING not in compile_with_launchers(source, folder).log


@pytest.mark.check("cuda")
@pytest.mark.parametrize("source", [each for each in SOURCES if name_of(each) not in OPTIMIZED], ids=name_of)
def test_products_of_other_sources_stay_in_flight(source: Path, tmp_path: Path) -> None:
    assert WAITING not in compile_now(f'#include "{source}"', tmp_path / source.name).log


@by_source
def test_kernels_state_their_dynamic_shared_memory(source: Path, folder: Path) -> None:
    code = compile_with_launchers(source, folder).code
    # Only kernels have parameters in constant memory.
    kernels = set(re.findall(rb"\.nv\.constant0\.(\w+)", code))
    stating = {kernel for kernel in kernels if kernel + b"_shared_bytes" in code}
    assert kernels and stating == (kernels if "extern __shared__" in with_includes(source) else set())


def test_compiling_leaves_the_interpreters_bytes_alone(tmp_path: Path) -> None:
    compile_now("__global__ void nothing() {}", tmp_path / "nothing.cu")
    # Python has one object for each bytes of length one: an empty log, written over such an object, made every
    # space that came alone from a socket a zero byte.
    assert all(bytes([value])[0] == value for value in range(256))
