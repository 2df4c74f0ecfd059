"""Compiles Triton's kernels for cards that are not there, and prints the shared memory that each takes.

A program, `python -m tests.support.compiled_for_cards 80 89`: tests set Triton's interpreter for their whole process.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Compute capability, and the bytes of shared memory that a block may have (CUDA C++ Programming Guide, table of compute
# capabilities): A100, RTX 4090 and L40S, H100, B200, RTX 5090.
CARDS: Mapping[int, int] = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# A head's own and shared channels of keys, and values: DeepSeek-V3's, GLM-4.7-Flash's.
WIDTHS = ((128, 64, 128), (192, 64, 256))
POINTERS = {"query": "*bf16", "nope": "*bf16", "rope": "*bf16", "value": "*bf16", "pool": "*bf16", "log_sums": "*fp32"}
POINTERS |= {"query_starts": "*i32", "key_starts": "*i32", "block_table": "*i32", "lengths": "*i32", "tokens": "*i32"}


def compiled_bytes(kernel: Any, card: int, constants: Mapping[str, int], out: str, warps: int, stages: int) -> int:
    """Shared memory of a kernel for `card`. constants: its constexpr arguments; out: the type of its outputs."""
    names = kernel.arg_names
    kinds = POINTERS | {"out": out, "scale": "fp32", "kv_scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if signature[name][0] == "*"}
    source = ASTSource(kernel, signature, places, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return int(compile(source, target=GPUTarget("cuda", card, 32), options=options).metadata.shared)


def prompts(card: int) -> Iterator[tuple[str, int]]:
    from kernels.mla_prefill.triton import _attend, choose_tiling, padded_widths

    for widths in WIDTHS:
        padded = tuple(padded_widths(widths))
        tiling = choose_tiling(padded, 2, CARDS[card])
        names = ("NOPE", "ROPE", "VALUE", "PADDED_NOPE", "PADDED_ROPE", "PADDED_VALUE", "QUERIES", "KEYS")
        constants = dict(zip(names, (*widths, *padded, tiling.queries, tiling.keys), strict=True))
        yield f"prompts of {widths}", compiled_bytes(_attend, card, constants, "*bf16", 8, tiling.stages)


def decoding(card: int) -> Iterator[tuple[str, int]]:
    from kernels.mla_decode.triton import ROOM_BYTES, ROW_TILE, SMALL_ROW_TILE, _decode

    rows = ROW_TILE if CARDS[card] >= ROOM_BYTES else SMALL_ROW_TILE
    constants = {"QUERY_TOKENS": 1, "VALUE": 512, "WIDTH": 576, "PADDED_VALUE": 512, "PADDED_REST": 64, "BLOCK": 64}
    constants |= {"ROWS": rows, "TOKENS": 64 if rows == ROW_TILE else 32}
    warps = 8 if rows == ROW_TILE else 4
    yield "decoding", compiled_bytes(_decode, card, constants, "*fp32", warps, 2)


def selected(card: int) -> Iterator[tuple[str, int]]:
    from kernels.mla_selected.triton import HEAD_TILE, ROOM_BYTES, SMALL_HEAD_TILE, _attend

    heads = HEAD_TILE if CARDS[card] >= ROOM_BYTES else SMALL_HEAD_TILE
    constants = {"COUNT": 2048, "PADDED_COUNT": 2048, "VALUE": 512, "WIDTH": 576, "PADDED_VALUE": 512}
    constants |= {"PADDED_REST": 64, "HEADS": heads, "TOKENS": 32, "BLOCK": 64}
    yield "selected tokens", compiled_bytes(_attend, card, constants, "*bf16", 8 if heads == HEAD_TILE else 4, 2)


if __name__ == "__main__":
    for card in map(int, sys.argv[1:]):
        for name, taken in (*prompts(card), *decoding(card), *selected(card)):
            print(f"{card}\t{taken}\t{name}")  # noqa: T201
