from engine.plan.queues import WaitingQueue
from engine.plan.tenants import ALONE
from engine.requests.progress import Progress
from engine.requests.request import Request
from mesh.domain.sampling import Sampling


def request(batch: int, position: int) -> Request:
    return Request(
        key=position,
        request_id="",
        progress=Progress([1]),
        prompt_tokens=1,
        limit=2,
        stop_token_ids=frozenset(),
        sampling=Sampling(),
        most_drafts=0,
        phase=None,
        history=None,
        root=b"",
        arrival=(batch, position),
    )


def test_earlier_arrival_batches_go_first() -> None:
    queue = WaitingQueue()
    late, early = request(2, 0), request(1, 1)
    queue.add(late, 1, 1)
    queue.add(early, 1000, 16)
    assert list(queue.in_order(ALONE)) == [early, late]


def test_the_shortest_of_an_arrival_batch_goes_first() -> None:
    queue = WaitingQueue()
    long, second, first = request(1, 0), request(1, 2), request(1, 1)
    for entry, tokens in ((long, 50), (second, 10), (first, 10)):
        queue.add(entry, tokens, 1)
    assert list(queue.in_order(ALONE)) == [first, second, long]


def test_a_removed_request_is_gone_with_its_tokens_and_blocks() -> None:
    queue = WaitingQueue()
    stays, goes = request(1, 0), request(1, 1)
    queue.add(stays, 10, 2)
    queue.add(goes, 20, 3)
    queue.remove(goes)
    assert goes not in queue
    assert list(queue.in_order(ALONE)) == [stays]
    assert (queue.tokens, queue.blocks) == (10, 2)
