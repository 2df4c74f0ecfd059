import os
import select
from contextlib import ExitStack

from engine.parallel.peers import GroupDescriptors
from engine.protocol.frames import RECEIVE_BYTES, FrameDecoder, FrameEncoder
from engine.protocol.messages import FromRank, Ready
from tests.support.engines import oracle_config
from tests.support.waiting import eventually
from worker.ranks.process import start_message, start_rank


async def test_a_rank_that_another_wakes_waits_for_its_service() -> None:
    config, group = oracle_config(), GroupDescriptors.create(1)
    (wakeup,) = group.wakeups
    with ExitStack() as undo:
        undo.callback(group.close)
        os.eventfd_write(wakeup, 1)
        rank = await start_rank(config, 0, group)
        undo.callback(os.close, rank.pulse_descriptor)
        undo.callback(rank.writer.close)
        try:
            # It has noticed, and there is no message.
            await eventually(lambda: not select.select([wakeup], [], [], 0)[0])
            rank.writer.write(bytes(FrameEncoder().encode(start_message(config, None, 0, None))))
            decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
            messages: list[FromRank] = []
            while not messages and (data := await rank.reader.read(RECEIVE_BYTES)):
                messages += decoder.feed(data)
            assert [type(message) for message in messages] == [Ready]
        finally:
            if rank.process.returncode is None:
                rank.process.kill()
            await rank.process.wait()
