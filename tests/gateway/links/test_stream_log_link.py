import asyncio

import grpc

from gateway.links.stream_log_link import StreamLogs
from mesh.domain.targets import WorkerTarget
from mesh.rpc.channel import Channels
from mesh.rpc.identity import Role
from tests.support.fake_decode import FakeDecodeWorker


class CountedChannels(Channels):
    """Keeps every channel that was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[grpc.aio.Channel] = []

    def open(self, endpoint: str, role: Role | None = None) -> grpc.aio.Channel:
        self.opened.append(super().open(endpoint, role))
        return self.opened[-1]


async def test_clients_that_come_at_once_share_a_channel() -> None:
    worker, channels = FakeDecodeWorker(), CountedChannels()
    logs = StreamLogs(channels)
    async with worker.started():
        target = WorkerTarget("decode-0", "first", f"127.0.0.1:{worker.port}", None)
        taken = await asyncio.gather(*(logs.take([target], bytes([number] * 16)) for number in range(20)))
    assert taken == [[]] * 20
    assert len(channels.opened) == 1
    assert channels.opened[0].get_state() is grpc.ChannelConnectivity.SHUTDOWN
