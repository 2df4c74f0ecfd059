import msgspec

from engine.batch import Row
from engine.runner.spread import offered
from mesh.domain.sparse_prefill import SparsePrefill


def test_the_longest_exact_chunk_is_offered() -> None:
    short, long = (Row([0] * tokens, 0, range(8), None) for tokens in (200, 300))
    sparse = msgspec.structs.replace(long, sparse=SparsePrefill(64, 0.9))
    assert offered([short, long], fewest=100) == 1
    assert offered([short, sparse], fewest=100) == 0
    assert offered([sparse, sparse], fewest=100) is None
