"""Estimates how long JSON takes to decode, so that text that would hold the event loop is refused before it is decoded.

Decoding runs in C and cannot be interrupted, and a thread would not help, since it holds the GIL. A text is therefore
weighed by its bytes: counting what it is made of takes 1 to 20 ns a byte, and decoding up to 1,800.
"""

from collections.abc import Iterable

from mesh.errors import InvalidRequest

# Most that one text may take on an idle core. The times below are those of msgspec on an AMD EPYC, in nanoseconds; each
# is that of the slowest case.
MAX_MILLISECONDS = 100
TOO_MANY_VALUES = "has too many lists, objects, keys or numbers to be read quickly: send fewer"
_BYTE = 3
# A key that no other object has.
_STRING = 200
# An integer, with what is done to it later; all values but the first of an object or list follow a comma.
_VALUE = 60
# A list in a list, with what the garbage collector makes of it.
_CONTAINER = 700
_FRACTION = 1000
# "1e300": numbers near the end of the range are read digit by digit.
_EXPONENT = 11_000
# Numbers of hundreds of digits. Up to this many bytes a value are no part of one.
_LONG_NUMBER_BYTE = 45
_SHORT_VALUE_BYTES = 8


def check_decoding(texts: Iterable[str], field: str, kind: type[InvalidRequest] = InvalidRequest) -> None:
    """Raises an error of `kind`, which names `field`, if the texts together take too long to decode."""
    if sum(decoding_ms(text.encode()) for text in texts) > MAX_MILLISECONDS:
        raise kind(f"{field} {TOO_MANY_VALUES}", field=field)


def decoding_ms(text: bytes) -> float:
    """Estimated time to decode JSON. If it is invalid, the part before the mistake is estimated at least."""
    unescaped = text
    if b"\\" in text:
        # The first call removes escaped backslashes, so that no backslash that is left is one of them.
        unescaped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    quotes = unescaped.count(b'"')
    time = _BYTE * len(text) + _STRING * quotes // 2
    # Splitting makes an object of each string, so it must not be done if there are millions.
    if time <= 1e6 * MAX_MILLISECONDS:
        time += _time_outside_strings(b"".join(unescaped.split(b'"')[::2]))
    return time / 1e6


def _time_outside_strings(text: bytes) -> int:
    values = text.count(b",")
    exponents = text.count(b"e") + text.count(b"E")
    if exponents:
        exponents -= text.count(b"true") + text.count(b"false")
    return (
        _VALUE * values
        + _CONTAINER * (text.count(b"[") + text.count(b"{"))
        + _FRACTION * text.count(b".")
        + _EXPONENT * exponents
        + _LONG_NUMBER_BYTE * max(0, len(text) - _SHORT_VALUE_BYTES * values)
    )
