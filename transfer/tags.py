"""Tags of UCX messages: two on which every store receives what workers tell it, and random ones for landings."""

import secrets

LOOKUP_TAG = 1 << 63
RECEIPT_TAG = LOOKUP_TAG + 1


def draw_tags(count: int) -> int:
    """Draw random tags for a landing: returns the first of `count` consecutive ones."""
    return secrets.randbelow(LOOKUP_TAG - count)


def landing_tags(segments: int) -> int:
    """How many tags a landing has: one for checksums, then one for each segment."""
    return 1 + segments


def landing_tag_after(answer_tag: int) -> int:
    """The first tag of the landing that follows a store's answer: the answer has the tag before it."""
    return answer_tag + 1


def segment_tag(landing_tag: int, index: int) -> int:
    return landing_tag + 1 + index


def segment_of(tag: int, landing_tag: int) -> int | None:
    """The segment that a tag of the landing belongs to; None for the tag of its checksums."""
    return None if tag == landing_tag else tag - landing_tag - 1


def are_landing_tags(landing_tag: int, segments: int) -> bool:
    return 0 <= landing_tag <= LOOKUP_TAG - landing_tags(segments)
