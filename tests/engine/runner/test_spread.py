from engine.batch import Row
from engine.runner.spread import offered
from mesh.domain.sparse_prefill import SparsePrefill


def test_the_longest_chunk_is_offered_sparse_or_exact() -> None:
    rows = [Row([0] * tokens, 0, range(8), None, sparse=sparse) for tokens, sparse in CHUNKS]
    assert offered(rows, fewest=100, reach=10_000) == 1
    assert offered(rows, fewest=500, reach=10_000) is None


def test_a_chunk_beyond_the_room_for_keys_is_not_offered() -> None:
    rows = [Row([0] * 300, start, range(8), None) for start in (900, 700)]
    assert offered(rows, fewest=100, reach=1000) == 1
    assert offered(rows, fewest=100, reach=999) is None


CHUNKS = [(200, None), (300, SparsePrefill(64, 0.9)), (250, None)]
