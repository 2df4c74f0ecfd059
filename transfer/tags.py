"""Tags of UCX messages: one for lookups, on which every store listens, and those of landings, drawn at random below."""

import secrets

LOOKUP_TAG = 1 << 63


def draw_tags(count: int) -> int:
    """The first of so many in a row, for a landing."""
    return secrets.randbelow(LOOKUP_TAG - count)


def landing_tags(segments: int) -> int:
    """How many a landing has, from its first on: one for digests, and one for each segment."""
    return 1 + segments


def landing_behind(answer_tag: int) -> int:
    """The first tag of the landing for a store's answer, which has the one before."""
    return answer_tag + 1


def segment_tag(landing_tag: int, index: int) -> int:
    return landing_tag + 1 + index


def segment_of(tag: int, landing_tag: int) -> int | None:
    """Which segment a tag of the landing is for; None for that of its digests."""
    return None if tag == landing_tag else tag - landing_tag - 1


def are_of_a_landing(landing_tag: int, segments: int) -> bool:
    return 0 <= landing_tag <= LOOKUP_TAG - landing_tags(segments)
