"""A decode worker of two ranks: one worker to its gateways, its prefill workers and its stores."""

from collections.abc import AsyncGenerator, Sequence

import pytest

from decode_svc.prefill_link import PrefillLink
from engine.protocol.messages import LandingOpened, Output
from mesh.domain.requests import Submission
from mesh.domain.targets import WorkerTarget
from mesh.rpc.channel import Channels
from tests.support.decode_server import AnyTarget, RunningWorker, gateway_client, running_worker
from tests.support.prefilling import running_prefill
from tests.support.ranks import frozen
from tests.support.waiting import eventually
from worker.ranks import group as rank_group
from worker.ranks.group import RankGroup


def prompt_of(length: int, seed: int) -> list[int]:
    return [(seed * 31 + number * number) % 1000 for number in range(length)]


def ranks_that_computed(running: RunningWorker) -> list[int]:
    """Ranks whose pool holds blocks of prompts."""
    return [rank for rank, view in enumerate(running.worker.host.ranks.views) if view.chains.newest(1)]


async def test_two_ranks_serve_a_gateway_with_exact_tokens() -> None:
    async with running_worker(ranks=2) as running, gateway_client(running.endpoint) as gateway:
        streams = [await gateway.submit(prompt_of(100 + seed, seed), 40) for seed in range(24)]
        for stream_id in streams:
            assert (await gateway.ended(stream_id)).is_exact()
        assert ranks_that_computed(running) == [0, 1]


async def test_a_conversation_goes_on_where_its_prefix_is() -> None:
    async with running_worker(ranks=2) as running, gateway_client(running.endpoint) as gateway:
        prompts = [prompt_of(640, seed) for seed in range(6)]
        for stream_id in [await gateway.submit(prompt, 5) for prompt in prompts]:
            await gateway.ended(stream_id)
        for prompt in prompts:
            again = await gateway.ended(await gateway.submit([*prompt, 7], 5))
            assert (again.cached_tokens, again.is_exact()) == (640, True)


async def test_requests_go_to_the_rank_that_their_placement_booked() -> None:
    async with running_worker(ranks=2) as running, gateway_client(running.endpoint) as gateway:
        for seed in range(3):
            await gateway.ended(await gateway.submit(prompt_of(100, seed), 5, rank=1))
        assert ranks_that_computed(running) == [1]


async def test_prompts_go_to_the_prefill_rank_that_their_placement_booked() -> None:
    async with (
        running_worker(prefill_link=RecordingLink(), engine={"transfer": {}}) as running,
        running_prefill(ranks=2) as prefill,
        gateway_client(running.endpoint) as gateway,
    ):
        for seed in range(3):
            stream_id = await gateway.submit(prompt_of(100, seed), 5, prefill=prefill.target, prefill_rank=1)
            assert (await gateway.ended(stream_id)).is_exact()
        first, second = prefill.worker.host.ranks.views
        assert (len(first.chains), len(second.chains)) == (0, 3)


class RecordingLink(PrefillLink):
    """Keeps the landings that prefill workers are told of."""

    def __init__(self) -> None:
        super().__init__(Channels(), AnyTarget())
        self.opened: list[LandingOpened] = []

    def call(self, target: WorkerTarget, submission: Submission, opened: LandingOpened) -> AsyncGenerator[Output, None]:
        self.opened.append(opened)
        return super().call(target, submission, opened)


# Ranks of the prefill and of the decode worker. Those that `make test` leaves out run with `make check-layouts`.
PAIRS = [(1, 2), (2, 2)]
LARGER_PAIRS = [(2, 4), (1, 4), (4, 1), (4, 2)]


@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks"),
    [*PAIRS, *(pytest.param(*each, marks=pytest.mark.check("layouts")) for each in LARGER_PAIRS)],
)
async def test_prefill_ranks_push_to_the_tickets_decode_rank(
    prefill_ranks: int, decode_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "END_SECONDS", 60)
    link = RecordingLink()
    async with (
        running_worker(ranks=decode_ranks, prefill_link=link, engine={"transfer": {}}) as running,
        running_prefill(ranks=prefill_ranks) as prefill,
        gateway_client(running.endpoint) as gateway,
    ):
        # No prompt ends before the last is given to a rank: so each rank has the least work once.
        with frozen(prefill.worker.host.ranks):
            streams = [await gateway.submit(prompt_of(300, seed), 20, prefill=prefill.target) for seed in range(6)]
            await eventually(lambda: prefill.worker.live_requests == 6)
        for stream_id in streams:
            assert (await gateway.ended(stream_id)).is_exact()
        ranks = running.worker.host.ranks
        await eventually(lambda: all(view.transfers.sent_bytes for view in prefill.worker.host.ranks.views))
        await eventually(lambda: received_bytes(ranks) == landed_bytes(ranks, link.opened))
    assert {ranks.rank_of(opened.key) for opened in link.opened} == set(range(decode_ranks))
    for opened in link.opened:
        rank = ranks.rank_of(opened.key)
        places = {(segment.destination_rank, segment.worker_address) for segment in opened.ticket.segments}
        assert places == {(rank, ranks.ranks[rank].ready.transfer_address)}


def received_bytes(ranks: RankGroup) -> list[int]:
    """What each rank says that it received."""
    return [sum(view.transfers.received_bytes.values()) for view in ranks.views]


def landed_bytes(ranks: RankGroup, landings: Sequence[LandingOpened]) -> list[int]:
    """What each rank's landings hold."""
    landed = [0] * len(ranks.ranks)
    for opened in landings:
        landed[ranks.rank_of(opened.key)] += opened.ticket.size_bytes
    return landed
