"""How the work of decode attention is divided: the rule in Python, what it promises, and that the device follows it."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.mla_decode import plan_decode

# The overhead of a piece in units; by how many units parts may be larger if that avoids splitting, and how many split
# requests allow one more; and the fewest units of a part, and of a piece that is not its request's last: with up to
# FEW_TOKENS tokens, and with more.
PIECE_COST, SPLIT_COST, SPLITS_OF_A_UNIT, FEWEST_OF_FEW, FEWEST_UNITS, FEW_TOKENS, TRIED = 2, 3, 16, 2, 4, 2, 8
UNIT_TOKENS, LATENT = 64, 512


@dataclass(frozen=True)
class Piece:
    """Consecutive units of a request, and its slot among the pieces of split requests; None if it is whole."""

    request: int
    first: int
    last: int
    slot: int | None


Parts = list[list[Piece]]


def fewest_units(tokens: int) -> int:
    return FEWEST_OF_FEW if tokens <= FEW_TOKENS else FEWEST_UNITS


def least_capacity(units: list[int], parts: int, tokens: int) -> int:
    return max(-(-sum(count + PIECE_COST for count in units) // parts), fewest_units(tokens) + PIECE_COST)


def pack_whole(units: list[int], room: list[int]) -> tuple[Parts, list[int]]:
    """Put each request into the first part that has room, the longest first. Takes the room from `room`.

    Returns the parts, and the requests that found no room.
    """
    made: Parts = [[] for _ in room]
    left = []
    for request in sorted(range(len(units)), key=lambda request: -units[request]):
        cost = units[request] + PIECE_COST
        part = next((part for part, free in enumerate(room) if free >= cost), None)
        if part is None:
            left.append(request)
        else:
            room[part] -= cost
            made[part].append(Piece(request, 0, units[request], None))
    return made, left


def fill_rests(units: list[int], room: list[int], left: list[int], fewest: int) -> tuple[Parts, bool]:
    """Split the requests in `left` over the room that there is. Returns the parts and whether all of it fits."""
    made: Parts = [[] for _ in room]
    waiting, first, slot = list(left), 0, 0
    for pieces, whole in zip(made, room, strict=True):
        free = whole - PIECE_COST
        # Parts with little room stay out.
        while waiting and whole - PIECE_COST >= fewest and free >= (1 if first else min(units[waiting[0]], fewest)):
            last = min(first + free, units[waiting[0]])
            pieces.append(Piece(waiting[0], first, last, slot))
            free -= last - first + PIECE_COST
            first, slot = last, slot + 1
            if last == units[waiting[0]]:
                waiting.pop(0)
                first = 0
    return made, not waiting


def divide_into_parts(units: list[int], parts: int, query_tokens: int = 1) -> Parts:
    """units: those of each request, at least one. Returns each part's pieces in the order in which it computes them."""
    found: list[tuple[int, Parts]] = []
    tokens = len(units) * query_tokens
    for more in range(TRIED):
        room = [least_capacity(units, parts, tokens) + more] * parts
        whole, left = pack_whole(units, room)
        split, fits = fill_rests(units, room, left, fewest_units(tokens))
        if fits:
            both = [first + second for first, second in zip(whole, split, strict=True)]
            found.append((more + (SPLIT_COST + len(left) // SPLITS_OF_A_UNIT if left else 0), both))
    return min(found, key=lambda rated: rated[0])[1]


def split_requests(parts: Parts) -> set[int]:
    return {piece.request for part in parts for piece in part if piece.slot is not None}


def splits_end_to_end(units: list[int], parts: int) -> int:
    """How many requests are split if all are laid end to end into equal parts of the least capacity."""
    borders = pairwise([0, *accumulate(count + PIECE_COST for count in units)])
    capacity = least_capacity(units, parts, len(units))
    return sum((start + PIECE_COST) // capacity != (end - 1) // capacity for start, end in borders)


def slots_of_split(parts: Parts) -> dict[int, tuple[int, int]]:
    """The first slot of each split request, and the one after its last."""
    slots = defaultdict(list)
    for piece in (piece for part in parts for piece in part):
        if piece.slot is not None:
            slots[piece.request].append(piece.slot)
    return {request: (min(own), max(own) + 1) for request, own in slots.items()}


def divide_on_device(lengths: list[int], heads: int, query_tokens: int) -> tuple[Parts, dict[int, tuple[int, int]]]:
    from kernels.mla_decode.parts import divide_work

    table = torch.zeros(len(lengths), 1, dtype=torch.int32, device="cuda")
    plan = plan_decode(table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), query_tokens)
    out = torch.empty(len(lengths) * query_tokens, heads, LATENT, dtype=torch.bfloat16, device="cuda")
    divide_work(plan, heads, out, UNIT_TOKENS)
    made = plan.schedule.metadata
    rows = made.pieces.tolist()
    pieces = [Piece(request, first, last, None if slot < 0 else slot) for request, first, last, slot in rows]
    splits = {request: (first, end) for request, first, end, _ in made.split_requests.tolist() if first < end}
    return [pieces[begin:end] for begin, end in pairwise(made.parts.tolist())], splits


UNITS = st.lists(st.integers(1, 200), min_size=1, max_size=150)
PARTS = st.integers(1, 132)


@given(UNITS, PARTS)
def test_a_requests_pieces_have_all_its_units_in_order(units: list[int], parts: int) -> None:
    borders: dict[int, list[int]] = defaultdict(lambda: [0])
    for piece in (piece for part in divide_into_parts(units, parts) for piece in part):
        assert borders[piece.request][-1] == piece.first < piece.last
        borders[piece.request].append(piece.last)
    assert {request: own[-1] for request, own in borders.items()} == dict(enumerate(units))


@given(UNITS, PARTS)
def test_no_part_costs_much_more_than_equal_ones_would(units: list[int], parts: int) -> None:
    made = divide_into_parts(units, parts)
    dearest = max(sum(piece.last - piece.first + PIECE_COST for piece in part) for part in made)
    assert dearest <= least_capacity(units, parts, len(units)) + TRIED - 1


@given(UNITS, PARTS)
def test_fewer_requests_are_split_than_there_are_parts(units: list[int], parts: int) -> None:
    made = divide_into_parts(units, parts)
    assert len(split_requests(made)) < parts
    assert sum(piece.slot is not None for part in made for piece in part) < 2 * parts


@given(st.integers(1, 200), st.integers(1, 200), PARTS)
def test_equal_contexts_are_split_as_rarely_as_end_to_end(units: int, requests: int, parts: int) -> None:
    contexts = [units] * requests
    assert len(split_requests(divide_into_parts(contexts, parts))) <= splits_end_to_end(contexts, parts)


@given(UNITS, PARTS)
def test_a_split_requests_pieces_follow_each_other_after_whole_ones(units: list[int], parts: int) -> None:
    made = divide_into_parts(units, parts)
    split = [piece for part in made for piece in part if piece.slot is not None]
    assert [piece.slot for piece in split] == list(range(len(split)))
    assert sum(end - first for first, end in slots_of_split(made).values()) == len(split)
    for part in made:
        assert [piece.slot is not None for piece in part] == sorted(piece.slot is not None for piece in part)


@pytest.mark.parametrize("requests", [64, 128, 192])
def test_equal_contexts_are_not_split_if_each_finds_a_part(requests: int) -> None:
    assert not split_requests(divide_into_parts([55] * requests, 66))


def test_only_the_requests_beyond_the_parts_are_split() -> None:
    assert len(split_requests(divide_into_parts([55] * 96, 66))) == 30


def test_requests_that_fill_two_parts_each_are_split_once() -> None:
    assert {end - first for first, end in slots_of_split(divide_into_parts([55] * 32, 66)).values()} == {2}


@pytest.mark.parametrize(("requests", "query_tokens", "fewest"), [(1, 1, 2), (2, 1, 2), (1, 2, 2), (3, 1, 4)])
def test_pieces_of_few_tokens_may_be_short(requests: int, query_tokens: int, fewest: int) -> None:
    pieces = [piece for part in divide_into_parts([56] * requests, 132, query_tokens) for piece in part]
    assert max(piece.last - piece.first for piece in pieces) == fewest


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "query_tokens"), [(128, 1), (128, 2), (16, 1), (128, 70)])
@pytest.mark.parametrize("requests", [1, 2, 3, 31, 66, 96, 300])
def test_the_device_divides_as_the_rule_says(requests: int, heads: int, query_tokens: int) -> None:
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    parts = max(processors // (query_tokens * -(-heads // 64)), 1)
    for longest in (64, 700, 9000):
        lengths = torch.randint(1, longest + 1, (requests,)).add(query_tokens - 1).tolist()
        expected = divide_into_parts([-(-length // UNIT_TOKENS) for length in lengths], parts, query_tokens)
        assert divide_on_device(lengths, heads, query_tokens) == (expected, slots_of_split(expected))
