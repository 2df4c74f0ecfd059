"""Structures read from CUDA sources. `test_cuda_sources` compares those that kernels take with the compiler's."""

import ctypes
from pathlib import Path

import pytest

from kernels.structures import structure


def write(folder: Path, text: str, name: str = "source.cu") -> Path:
    source = folder / name
    source.write_text(text)
    return source


def layout(made: type[ctypes.Structure]) -> dict[str, tuple[int, int]]:
    """The offset and size of each field, in bytes."""
    places = {name: getattr(made, name) for name, *_ in made._fields_ if name != "_tail"}
    return {name: (place.offset, place.size) for name, place in places.items()}


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        pytest.param("int a, b;", {"a": (0, 4), "b": (4, 4)}, id="several of a type"),
        pytest.param("const u8 *a, *b;", {"a": (0, 8), "b": (8, 8)}, id="several pointers"),
        pytest.param("unsigned short* a;\nshort b;", {"a": (0, 8), "b": (8, 2)}, id="types of two words"),
        pytest.param("int a; long long b;", {"a": (0, 4), "b": (8, 8)}, id="padding between fields"),
        pytest.param("u8 a[3];\nbool b;", {"a": (0, 3), "b": (3, 1)}, id="array of a number"),
        pytest.param("float a[MOST];", {"a": (0, 16)}, id="array of a constant"),
        pytest.param("Unknown* a;", {"a": (0, 8)}, id="pointer to a type of the device"),
        pytest.param("// int a;\nu64 b;  // Then int c;", {"b": (0, 8)}, id="comments"),
        pytest.param(
            "u32 a;\n  int of() const { return a ? 1 : 2; }\nu32 b;", {"a": (0, 4), "b": (4, 4)}, id="function"
        ),
    ],
)
def test_fields_lie_where_the_compiler_puts_them(
    declaration: str, expected: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    source = write(tmp_path, f"constexpr int FEW = 2, MOST = 4;\nstruct Given {{\n{declaration}\n}};\n")
    assert layout(structure(source, "Given")) == expected


def test_a_tensor_map_aligns_its_structure(tmp_path: Path) -> None:
    source = write(tmp_path, "struct Inner { TensorMap map; int rows; };\nstruct Outer { Inner a, b; u8* c; };")
    assert layout(structure(source, "Inner")) == {"map": (0, 128), "rows": (128, 4)}
    assert layout(structure(source, "Outer")) == {"a": (0, 192), "b": (192, 192), "c": (384, 8)}
    assert ctypes.sizeof(structure(source, "Outer")) == 448


def test_sources_share_the_structure_of_a_header(tmp_path: Path) -> None:
    write(tmp_path, "constexpr int MOST = 2;\nstruct Shared {\n  int rows[MOST];\n};\n", "shared.cuh")
    write(tmp_path, '#include "shared.cuh"\n', "between.cuh")
    source = write(tmp_path, '#include "between.cuh"\nstruct Given {\n  Shared shared;\n};\n')
    shared = structure(tmp_path / "shared.cuh", "Shared")
    assert structure(source, "Shared") is shared
    assert list(structure(source, "Given")(shared=shared(rows=(3, 4))).shared.rows) == [3, 4]


def test_fields_that_are_not_given_are_zero(tmp_path: Path) -> None:
    given = structure(write(tmp_path, "struct Given { int a; u8* b; };"), "Given")(a=1)
    assert (given.a, given.b) == (1, None)


def test_a_misspelled_field_is_refused(tmp_path: Path) -> None:
    made = structure(write(tmp_path, "struct Given { int rows; };"), "Given")
    with pytest.raises(AttributeError):
        made(row=1)
    with pytest.raises(AttributeError):
        made().row = 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param("half a;", "Given.a has a type that is not known: half", id="type"),
        pytest.param("int& a;", "Given has a field that is not understood: int& a", id="syntax"),
        pytest.param("int a[2 * MOST];", r"not understood: int a\[2 \* MOST\]", id="computed length"),
        pytest.param("int a[MOST];", "Given.a has a length that is no number", id="unknown length"),
        pytest.param("int a; TensorMap b;", "Given.b must stand first", id="tensor map after another field"),
    ],
)
def test_what_is_not_understood_is_named(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        structure(write(tmp_path, f"struct Given {{ {body} }};"), "Given")


def test_a_source_without_the_structure_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"source.cu and the headers that it includes have no struct Given"):
        structure(write(tmp_path, "struct Other { int a; };"), "Given")
