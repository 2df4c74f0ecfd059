"""The CUDA sources compile for Hopper as they are meant to, and agree with the modules that launch them.

NVRTC compiles without a device.
"""

import ctypes
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kernels import __file__ as package

KERNELS = Path(package).parent
SOURCES = sorted(KERNELS.glob("*/cuda/*.cu"))


def has_nvrtc() -> bool:
    try:
        import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except (ImportError, RuntimeError):
        return False
    return True


def by_source(source: Path) -> Any:
    """A test parameter. Tests of the same source run in the same process and so share one compilation."""
    name = f"{source.parts[-3]}-{source.stem}"
    return pytest.param(source, id=name, marks=pytest.mark.xdist_group(f"compile {name}"))


pytestmark = [
    pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC (nvidia-cuda-nvrtc)"),
    pytest.mark.parametrize("source", [by_source(source) for source in SOURCES]),
]


@cache
def compile_with_launchers(source: Path, folder: Path) -> Any:
    """Compile the source with static assertions of the values that its launchers repeat."""
    launchers = find_launchers(source)
    assert launchers, "no module launches it"
    stated = {line for module in launchers for line in (*layouts(module), *constants(module, source))}
    program = folder / f"asserted_{source.name}"
    program.write_text("\n".join([f'#include "{source}"', *(f"static_assert({line});" for line in sorted(stated))]))
    return import_module("kernels.nvrtc").compile_source(program, "sm_90a")


def find_launchers(source: Path) -> list[ModuleType]:
    """The modules of the operation that launch this source: they name its file."""
    operation = source.parent.parent
    modules = [path for path in operation.glob("*.py") if f'"{source.name}"' in path.read_text()]
    return [import_module(f"kernels.{operation.name}.{path.stem}") for path in modules]


def layouts(module: ModuleType) -> Iterator[str]:
    """The size of each argument structure of the module, and the offset and size of each field."""
    for structure in vars(module).values():
        if isinstance(structure, type) and issubclass(structure, ctypes.Structure):
            name = structure.__name__
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


def test_a_source_agrees_with_its_launchers_and_keeps_products_in_flight(source: Path, folder: Path) -> None:
    compiled = compile_with_launchers(source, folder)
    # The compiler says this where it waits after every product.
    assert "serialized" not in compiled.log


def test_kernels_state_their_dynamic_shared_memory(source: Path, folder: Path) -> None:
    code = compile_with_launchers(source, folder).code
    kernels = set(re.findall(rb"\.text\.(\w+)", code))
    stating = {kernel for kernel in kernels if kernel + b"_shared_bytes" in code}
    assert kernels and stating == (kernels if "extern __shared__" in with_includes(source) else set())


def test_compiling_leaves_the_interpreters_bytes_alone(source: Path, folder: Path) -> None:
    compile_with_launchers(source, folder)
    # Python has one object for each bytes of length one: an empty log, written over such an object, made every
    # space that came alone from a socket a zero byte.
    assert all(bytes([value])[0] == value for value in range(256))
