from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from kernels.mla_prefill.tiles import QUERIES, cut_tiles

lengths = st.lists(st.tuples(st.integers(1, 700), st.integers(0, 900)), max_size=6)


@given(lengths)
def test_tiles_show_every_query_its_keys_once(prompts: list[tuple[int, int]]) -> None:
    counts = [queries for queries, _ in prompts]
    sizes = [queries + cached for queries, cached in prompts]
    # For each query, the first key of its prompt and the number of keys that it sees.
    expected = [
        (first_key, size - count + row + 1)
        for count, size, first_key in zip(counts, sizes, accumulate(sizes, initial=0), strict=False)
        for row in range(count)
    ]
    found: dict[int, tuple[int, int]] = {}
    for first_query, queries, first_key, keys in cut_tiles(counts, sizes):
        assert 1 <= queries <= QUERIES
        for row in range(queries):
            assert first_query + row not in found
            found[first_query + row] = (first_key, keys - queries + row + 1)
    assert found == dict(enumerate(expected))


@given(lengths)
def test_tiles_that_see_most_keys_come_first(prompts: list[tuple[int, int]]) -> None:
    tiles = cut_tiles([queries for queries, _ in prompts], [sum(lengths) for lengths in prompts])
    seen = [keys for *_, keys in tiles]
    assert seen == sorted(seen, reverse=True)
