"""Constants of XXH3's 64-bit hash of more than 240 bytes (Collet, "XXH3 specification", 2021), for kernels."""

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 64 << 10
SECRET_WORDS = 24
# Words of `seeded_table`.
TABLE_WORDS = 48

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8"
    "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb17"
    "0ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIMES_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIMES_64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


_ACCUMULATORS = np.array(
    [PRIMES_32[2], PRIMES_64[0], PRIMES_64[1], PRIMES_64[2], PRIMES_64[3], PRIMES_32[1], PRIMES_64[4], PRIMES_32[0]],
    np.uint64,
).tobytes()  # fmt: skip


def seeded_table(seed: int) -> npt.NDArray[np.int64]:
    """The seed's secret (24 words), its parts for the last stripe (8) and for merging (8), initial accumulators (8)."""
    words = np.frombuffer(SECRET, np.uint64).copy()
    words[::2] += np.uint64(seed)
    words[1::2] -= np.uint64(seed)
    secret = words.tobytes()
    return np.frombuffer(secret + secret[121:185] + secret[11:75] + _ACCUMULATORS, np.int64)
