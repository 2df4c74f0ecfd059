"""Sessions over a fake rank, and the frames that their gateways get."""

from decode_svc.session import GatewayAttachment
from decode_svc.sessions import GatewaySessions, SessionLimits
from tests.support.decoding import FakePrompts, FakeRank
from tests.support.scheduling import ManualClock

GRACE = 5.0


def make_sessions(**limits: int) -> tuple[GatewaySessions, FakeRank, ManualClock]:
    rank, clock = FakeRank(), ManualClock()
    return GatewaySessions(rank, FakePrompts(), clock, GRACE, SessionLimits(**limits)), rank, clock


def attach(sessions: GatewaySessions, gateway: str = "g", incarnation: str = "i", **resume: int) -> GatewayAttachment:
    """Attach a gateway. resume: arguments such as _7=12, by which stream 7 goes on at position 12."""
    return sessions.attach(gateway, incarnation, {int(name[1:]): position for name, position in resume.items()})


async def taken(attachment: GatewayAttachment) -> dict[int, tuple[int, list[int], object]]:
    """The next frame: by stream id, the first position, the tokens and the end."""
    frame = await attachment.next_frame()
    assert frame is not None
    return {out.stream_id: (out.first_position, list(out.token_ids), out.terminal) for out in frame.outputs}
