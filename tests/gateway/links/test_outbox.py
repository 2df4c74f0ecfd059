import asyncio

from gateway.links.outbox import Outbox
from tests.support.waiting import PATIENCE_SECONDS


def test_submissions_are_written_in_their_order_and_acknowledgements_together() -> None:
    outbox = Outbox()
    for stream_id in (1, 2):
        outbox.submit(stream_id)
        outbox.acknowledge(10 + stream_id)
    assert [outbox.pop_submission() for _ in range(3)] == [1, 2, None]
    assert outbox.pop_acknowledgements() == [11, 12]
    assert outbox.pop_acknowledgements() == []


async def test_submissions_alone_wait_for_the_next_stream() -> None:
    outbox = Outbox()
    outbox.submit(1)
    outbox.cancel(2)
    outbox.acknowledge(3)
    outbox.reattach()
    await asyncio.wait_for(outbox.filled(), PATIENCE_SECONDS)
    assert (outbox.pop_cancellation(), outbox.pop_acknowledgements()) == (None, [])
    assert outbox.pop_submission() == 1


async def test_the_writer_waits_until_something_is_put_in() -> None:
    outbox = Outbox()
    for put_in, pop in (
        (outbox.submit, outbox.pop_submission),
        (outbox.cancel, outbox.pop_cancellation),
        (outbox.acknowledge, outbox.pop_acknowledgements),
    ):
        writer = asyncio.create_task(outbox.filled())
        await asyncio.sleep(0)
        assert not writer.done()
        put_in(1)
        await asyncio.wait_for(writer, PATIENCE_SECONDS)
        assert pop() in (1, [1])
