import pytest

from kernels.ghash.reference import ghash
from transfer.gmac import TAG_BYTES, hash_key_and_masks, tags

KEY = bytes(range(32))


@pytest.mark.parametrize("size", [16, 1024, 40])
def test_a_tag_is_the_hidden_hash_of_piece_and_length(size: int) -> None:
    pieces = [memoryview(bytes([number]) * size) for number in range(3)]
    key, masks = hash_key_and_masks(KEY, 5, 3)
    expected = b""
    for number, piece in enumerate(pieces):
        padded = bytes(piece) + bytes(-size % TAG_BYTES)
        hashed = ghash(key, padded + (8 * size).to_bytes(8) + bytes(8))
        mask = masks[number * TAG_BYTES : (number + 1) * TAG_BYTES]
        expected += bytes(x ^ y for x, y in zip(hashed, mask, strict=True))
    assert tags(KEY, 5, pieces) == expected
