import msgspec

from mesh.domain.kv_identity import KvNamespace
from mesh.errors import InvalidRequest, NamespaceMismatch
from transfer.segments import plan_whole
from transfer.tickets import OTHER_NAMESPACE, WRONG_SIZE, Geometry, make_ticket, refusal_of

NAMESPACE = KvNamespace(weights_fingerprint="weights", dtype="float32", layers=4, layout="mla:8+8")
LAYERS, BLOCKS, PIECE_BYTES = 4, 6, 1000
LARGEST = LAYERS * BLOCKS * PIECE_BYTES
TICKET = make_ticket(plan_whole(LAYERS, BLOCKS, PIECE_BYTES, LARGEST), PIECE_BYTES, NAMESPACE, 0, b"address", 0, 10.0)


def test_a_ticket_names_the_rank_that_its_landing_is_on() -> None:
    ticket = make_ticket(plan_whole(LAYERS, BLOCKS, PIECE_BYTES, 8000), PIECE_BYTES, NAMESPACE, 3, b"address", 0, 10.0)
    assert {(segment.destination_rank, segment.worker_address) for segment in ticket.segments} == {(3, b"address")}


def test_slots_as_large_as_the_segments_are_enough() -> None:
    assert refusal_of(TICKET, BLOCKS, NAMESPACE, Geometry(LAYERS, PIECE_BYTES, LARGEST)) is None


def test_segments_larger_than_slots_are_refused_naming_the_setting() -> None:
    refusal = refusal_of(TICKET, BLOCKS, NAMESPACE, Geometry(LAYERS, PIECE_BYTES, LARGEST - 1))
    assert refusal is not None
    assert (refusal.reason, type(refusal.error)) == (WRONG_SIZE, InvalidRequest)
    assert "transfer.slot_bytes of this worker is 23999: raise it to 24000 or more" in refusal.error.message


DRAFTING = msgspec.structs.replace(NAMESPACE, layers=LAYERS + 1, draft_layers=1)


def test_a_landing_without_drafts_layers_takes_the_others() -> None:
    assert refusal_of(TICKET, BLOCKS, DRAFTING, Geometry(LAYERS + 1, PIECE_BYTES, LARGEST)) is None


def test_a_landing_with_draft_layers_is_refused_without_any() -> None:
    tiles = plan_whole(LAYERS + 1, BLOCKS, PIECE_BYTES, 2 * LARGEST)
    ticket = make_ticket(tiles, PIECE_BYTES, DRAFTING, 0, b"address", 0, 10.0)
    refusal = refusal_of(ticket, BLOCKS, NAMESPACE, Geometry(LAYERS, PIECE_BYTES, 2 * LARGEST))
    assert refusal is not None
    assert (refusal.reason, type(refusal.error)) == (OTHER_NAMESPACE, NamespaceMismatch)


def test_a_landing_of_layers_outside_its_namespace_is_refused() -> None:
    tiles = plan_whole(LAYERS + 1, BLOCKS, PIECE_BYTES, 2 * LARGEST)
    ticket = make_ticket(tiles, PIECE_BYTES, NAMESPACE, 0, b"address", 0, 10.0)
    refusal = refusal_of(ticket, BLOCKS, DRAFTING, Geometry(LAYERS + 1, PIECE_BYTES, 2 * LARGEST))
    assert refusal is not None and refusal.reason == WRONG_SIZE
