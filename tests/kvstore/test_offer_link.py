"""The end of a worker's offers to a store."""

import asyncio
from typing import Any, NoReturn

from kvstore.offer_link import OfferLink
from mesh.errors import UnknownSession
from tests.support.scheduling import make_identity
from tests.support.waiting import PATIENCE_SECONDS
from transfer.ticket import StoreSession


class Losing:
    """A store's stub and its user. The offer fails as it is cancelled, with its own error, as a call of gRPC may."""

    def __init__(self) -> None:
        self.offered = asyncio.Event()

    async def Offer(self, *request: Any, **options: Any) -> NoReturn:
        self.offered.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise UnknownSession("none") from None
        raise AssertionError("the call ended by itself")


async def test_offers_end_although_one_lost_the_cancellation() -> None:
    stub: Any = Losing()
    link = OfferLink(stub, asyncio.Event())
    namespace = make_identity("decode-0").kv_namespace
    link.begin(StoreSession("kvstore-0", "epoch", b"", 1, bytes(32), namespace))
    link.put([bytes(16)])
    offering = asyncio.create_task(link.run(stub))
    await stub.offered.wait()
    offering.cancel()
    await asyncio.wait([offering], timeout=PATIENCE_SECONDS)
    assert offering.cancelled()
