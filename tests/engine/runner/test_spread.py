from engine.batch import Row
from engine.runner.spread import offered
from mesh.domain.sparse_prefill import SparsePrefill


def test_the_longest_chunk_is_offered_whether_its_prompt_is_sparse_or_not() -> None:
    rows = [Row([0] * tokens, 0, range(8), None, sparse=sparse) for tokens, sparse in CHUNKS]
    assert offered(rows, fewest=100) == 1
    assert offered(rows, fewest=500) is None


CHUNKS = [(200, None), (300, SparsePrefill(64, 0.9)), (250, None)]
