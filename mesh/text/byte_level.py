"""The letters by which byte-level BPE spells bytes (Radford et al., GPT-2, 2019; `tokenizers` calls it ByteLevel)."""

from functools import cache


@cache
def letters_of_bytes() -> dict[int, str]:
    """Each byte's letter: itself if it is visible, else one from U+0100 up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in set(visible))
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + index) for index, byte in enumerate(hidden)}
