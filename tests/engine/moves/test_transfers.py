"""One engine and its agent: how long transfers hold blocks, what is refused, what is reported."""

import random
from typing import Any

import msgspec
import pytest

from engine.engine import Engine
from engine.oracle.tokens import oracle_tokens
from engine.protocol.messages import Cancel, FirstToken, LandingOpened, PushOffer, PushTarget, Submit, TransferNews
from mesh.blocks import chain_hashes
from mesh.domain.targets import StoreTarget
from tests.support.disaggregation import LayerReportingOracle, moving_engine
from tests.support.engines import VOCABULARY, LayeredDevice, Transcript, oracle_engine, prompt_of, submit_of
from tests.support.fake_agent import Fabric, FakeAgent
from transfer.events import Landed, PushEnded
from transfer.ticket import Ticket


def make_fabric() -> Fabric:
    return Fabric(random.Random(0))


def turn(engine: Engine, transcript: Transcript | None = None) -> Transcript:
    """Step until there is no work."""
    transcript = transcript or Transcript()
    engine.poll_transfers()
    while engine.has_work():
        transcript.record(engine.step())
        engine.poll_transfers()
    return transcript


def held_blocks(engine: Engine) -> int:
    return engine.pool.total_blocks - engine.pool.free_blocks


def opened_landing(engine: Engine, tokens: int) -> LandingOpened:
    """The landing of a request of that length, with key 1."""
    engine.submit(submit_of(1, prompt_of(tokens), 5, remote_prefill=True))
    turn(engine)
    (opened,) = [news for news in engine.transfers.drain_news() if isinstance(news, LandingOpened)]
    return opened


def landing_elsewhere(fabric: Fabric, tokens: int) -> Ticket:
    """The ticket of a landing that another engine opened for a prompt of that length."""
    return opened_landing(moving_engine(fabric, total_blocks=32), tokens).ticket


def push_submit(
    ticket: Ticket, tokens: int, held_blocks: int = 0, key: int = 1, max_tokens: int = 1, **settings: Any
) -> Submit:
    return submit_of(key, prompt_of(tokens), max_tokens, push=PushTarget(ticket, held_blocks), **settings)


def agent_of(engine: Engine, fabric: Fabric) -> FakeAgent:
    (agent,) = [agent for agent in fabric.agents if agent.memory.blocks == engine.pool.total_blocks]
    return agent


def test_a_cancelled_landing_holds_its_blocks_while_they_are_written() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=8)
    opened_landing(engine, 200)
    engine.cancel(Cancel(1))
    assert turn(engine).ends[1].finish == "cancelled"
    assert held_blocks(engine) == 4
    assert fabric.run_one()
    turn(engine)
    assert held_blocks(engine) == 0


@pytest.mark.parametrize("tokens", [200, 900])
def test_a_landing_may_take_longer_for_a_longer_prompt(tokens: int) -> None:
    opened = opened_landing(moving_engine(make_fabric(), total_blocks=32), tokens)
    assert opened.ticket.deadline_ms == 60_000 + 2 * tokens


def test_a_cancelled_fetch_holds_its_blocks_until_it_is_answered() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=8)
    engine.submit(submit_of(1, prompt_of(200), 5, fetch=StoreTarget("store", 3)))
    turn(engine)
    engine.cancel(Cancel(1))
    assert turn(engine).ends[1].finish == "cancelled"
    assert held_blocks(engine) == 3
    assert fabric.run_one()
    turn(engine)
    assert held_blocks(engine) == 0


def test_a_push_holds_its_blocks_after_the_requests_end() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16)
    ticket = landing_elsewhere(fabric, 200)
    engine.submit(push_submit(ticket, 200))
    assert turn(engine).ends[1].finish == "length"
    assert held_blocks(engine) == 4
    while fabric.run_one():
        turn(engine)
    assert held_blocks(engine) == 0
    ended = engine.transfers.drain_news()[-1]
    assert ended == PushEnded(ticket.transfer_id, ticket.size_bytes, "fake")


def test_only_pushes_of_prompts_count_for_the_pace() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16)
    agent = agent_of(engine, fabric)
    pushed, offered = landing_elsewhere(fabric, 200), landing_elsewhere(fabric, 192)
    engine.submit(push_submit(pushed, 200))
    turn(engine)
    engine.transfers.handle(PushOffer(offered, chain_hashes(prompt_of(200))))
    agent.emit(PushEnded(offered.transfer_id, 100_000_000, "fake", seconds=0.1))
    engine.poll_transfers()
    assert engine.load().push_bytes_per_second is None
    agent.emit(PushEnded(pushed.transfer_id, 50_000_000, "fake", seconds=0.1))
    engine.poll_transfers()
    assert engine.load().push_bytes_per_second == pytest.approx(5e8)


def test_a_small_push_does_not_count_for_the_pace() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16)
    agent = agent_of(engine, fabric)
    for key, size_bytes in enumerate((1000, 50_000_000)):
        ticket = landing_elsewhere(fabric, 200)
        engine.submit(push_submit(ticket, 200, key=key))
        turn(engine)
        agent.emit(PushEnded(ticket.transfer_id, size_bytes, "fake", seconds=0.1))
        engine.poll_transfers()
        assert (engine.load().push_bytes_per_second is None) == (size_bytes == 1000)
    assert engine.load().push_bytes_per_second == pytest.approx(5e8)


def test_a_cancel_after_the_last_output_still_stops_the_push() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16)
    # The push has eight segments, so that some are left when it is cancelled.
    engine.submit(push_submit(landing_elsewhere(fabric, 1000), 1000))
    turn(engine)
    engine.cancel(Cancel(1))
    while fabric.run_one():
        turn(engine)
    (ended,) = engine.transfers.drain_news()
    assert isinstance(ended, PushEnded)
    assert ended.error is not None
    assert held_blocks(engine) == 0


def test_a_request_cancelled_while_waiting_frees_its_ticket() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16)
    ticket = landing_elsewhere(fabric, 200)
    engine.submit(push_submit(ticket, 200))
    engine.cancel(Cancel(1))
    turn(engine)
    engine.submit(push_submit(ticket, 200))
    assert turn(engine).ends[1].finish == "length"


def refusal_of(engine: Engine, submit: Submit) -> str:
    engine.submit(submit)
    end = turn(engine).ends[submit.key]
    assert end.refusal is not None
    assert held_blocks(engine) == 0
    return end.refusal.reason


def test_a_landing_of_another_namespace_is_refused() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16)
    ticket = landing_elsewhere(fabric, 200)
    other = msgspec.structs.replace(ticket.namespace, weights_fingerprint="another model")
    submit = push_submit(msgspec.structs.replace(ticket, namespace=other), 200)
    assert refusal_of(engine, submit) == "NAMESPACE_MISMATCH"


def test_a_ticket_that_does_not_fit_its_prompt_is_refused() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16)
    ticket = landing_elsewhere(fabric, 200)
    engine.submit(submit_of(2, prompt_of(70), 5))
    assert refusal_of(engine, push_submit(ticket, 300)) == "INVALID_REQUEST"
    assert refusal_of(engine, push_submit(ticket, 200, held_blocks=1)) == "INVALID_REQUEST"
    engine.submit(push_submit(ticket, 200))
    assert turn(engine).ends[1].finish == "length"


@pytest.mark.parametrize("changes", [{"max_tokens": 2}, {"remote_prefill": True}])
def test_a_prompt_that_is_pushed_draws_one_token_here(changes: dict[str, Any]) -> None:
    fabric = make_fabric()
    submit = push_submit(landing_elsewhere(fabric, 200), 200, **changes)
    engine = moving_engine(fabric, total_blocks=16)
    assert refusal_of(engine, submit) == "INVALID_REQUEST"


@pytest.mark.parametrize("held", [-1, 4, 100])
def test_held_blocks_leave_something_to_push(held: int) -> None:
    fabric = make_fabric()
    submit = push_submit(landing_elsewhere(fabric, 200), 200, held_blocks=held)
    assert refusal_of(moving_engine(fabric, total_blocks=16), submit) == "INVALID_REQUEST"


def test_a_ticket_serves_one_request_at_a_time() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16)
    ticket = landing_elsewhere(fabric, 200)
    engine.submit(push_submit(ticket, 200))
    engine.submit(push_submit(ticket, 200, key=2))
    transcript = turn(engine)
    assert transcript.ends[1].finish == "length"
    assert transcript.ends[2].refusal is not None


def test_an_engine_without_an_agent_refuses_what_would_move() -> None:
    for options in ({"remote_prefill": True}, {"fetch": StoreTarget("store", 1)}):
        engine = oracle_engine(total_blocks=8)
        engine.submit(submit_of(1, prompt_of(100), 5, **options))
        end = Transcript().run(engine).ends[1]
        assert end.refusal is not None and end.refusal.reason == "INVALID_REQUEST"


def test_a_first_token_of_an_ended_request_is_ignored() -> None:
    engine = moving_engine(make_fabric(), total_blocks=8)
    engine.submit(submit_of(1, prompt_of(100), 3))
    engine.step()
    engine.first_token(FirstToken(1, 7))
    engine.first_token(FirstToken(2, 7))
    assert turn(engine).ends[1].finish == "length"


def test_a_second_first_token_is_ignored() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=8)
    opened = opened_landing(engine, 100)
    engine.first_token(FirstToken(1, 7))
    engine.first_token(FirstToken(1, 8))
    agent_of(engine, fabric).emit(Landed(opened.ticket.transfer_id, 1, "fake"))
    # Four of five tokens are left.
    assert len(turn(engine).token_ids[1]) == 4


def test_a_first_token_is_left_to_the_service_to_report() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=8)
    opened = opened_landing(engine, 100)
    engine.first_token(FirstToken(1, 7))
    assert not engine.has_work()
    agent_of(engine, fabric).emit(Landed(opened.ticket.transfer_id, 1, "fake"))
    engine.poll_transfers()
    result = engine.step()
    assert result is not None
    assert [(output.first_position, len(output.token_ids)) for output in result.outputs] == [(101, 1)]


def test_a_lost_landing_ends_its_request_after_its_first_token() -> None:
    fabric = make_fabric()
    fabric.failure_probability = 1.0
    engine = moving_engine(fabric, total_blocks=8)
    opened_landing(engine, 100)
    engine.first_token(FirstToken(1, 7))
    transcript = turn(engine)
    assert fabric.run_one()
    end = turn(engine, transcript).ends[1]
    assert end.refusal is not None and end.refusal.reason == "PREFILL_LOST"
    assert end.first_position == 101
    assert held_blocks(engine) == 0


def test_decoding_stalls_and_goes_on_while_landings_hold_the_pool() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=4)
    prompt = prompt_of(60)
    engine.submit(submit_of(2, prompt, 70))
    transcript = Transcript()
    transcript.record(engine.step())
    engine.submit(submit_of(1, prompt_of(120), 5, remote_prefill=True))
    engine.submit(submit_of(3, prompt_of(10), 1, remote_prefill=True))
    turn(engine, transcript)
    assert held_blocks(engine) == 4
    assert 2 not in transcript.ends and not engine.has_work()
    engine.cancel(Cancel(1))
    while fabric.run_one():
        turn(engine, transcript)
    assert transcript.token_ids[2] == oracle_tokens(prompt, 70, VOCABULARY)


def test_a_long_prompt_is_pushed_by_chunk_and_layer() -> None:
    fabric = make_fabric()
    settings = {"total_blocks": 16, "max_step_tokens": 100, "max_requests": 4}
    engine = moving_engine(fabric, LayerReportingOracle, layerwise_tokens=128, **settings)
    engine.submit(push_submit(landing_elsewhere(fabric, 230), 230))
    turn(engine)
    agent = agent_of(engine, fabric)
    # Chunks end at 100, 200 and 230 tokens. Each has two calls: one for its layer, and one at its end.
    assert [blocks for _, _, blocks in agent.ready_calls] == [1, 1, 3, 3, 4, 4]


def test_a_landing_is_reported_before_the_step_computes() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=8)
    engine.submit(submit_of(1, prompt_of(65), 5, remote_prefill=True))
    engine.submit(submit_of(2, prompt_of(130), 5))
    reported: list[TransferNews] = []
    result = engine.step(lambda: reported.extend(engine.transfers.drain_news()))
    assert result is not None and [output.key for output in result.outputs] == [2]
    assert [type(news) for news in reported] == [LandingOpened]


def test_early_layers_are_reported_while_a_device_computes_the_others() -> None:
    fabric = make_fabric()
    settings = {"total_blocks": 16, "max_step_tokens": 256, "max_requests": 4}
    engine = moving_engine(fabric, LayeredDevice, layerwise_tokens=128, **settings)
    engine.submit(push_submit(landing_elsewhere(fabric, 230), 230))
    agent = agent_of(engine, fabric)
    # The first step is only launched: there is nothing to collect yet.
    engine.step()
    assert not agent.ready_calls
    engine.step()
    assert [(layers, blocks) for _, layers, blocks in agent.ready_calls] == [(1, 4), (2, 4), (1, 4)]


def test_landed_kv_waits_for_the_first_token() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=8, max_requests=1)
    opened = opened_landing(engine, 65)
    engine.submit(submit_of(2, prompt_of(10), 1))
    agent_of(engine, fabric).emit(Landed(opened.ticket.transfer_id, 1, "fake"))
    transcript = turn(engine)
    assert not transcript.token_ids.get(1) and not engine.has_work()
    engine.first_token(FirstToken(1, 7))
    turn(engine, transcript)
    assert len(transcript.token_ids[1]) == 4 and transcript.ends[2].finish == "length"


def test_a_short_prompt_is_pushed_when_it_is_computed() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16, max_step_tokens=100, max_requests=4)
    engine.submit(push_submit(landing_elsewhere(fabric, 230), 230))
    turn(engine)
    assert [blocks for _, _, blocks in agent_of(engine, fabric).ready_calls] == [4]


def test_cached_blocks_of_a_long_prompt_are_pushed_at_once() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16, max_step_tokens=64, max_requests=4, layerwise_tokens=128)
    engine.submit(submit_of(2, prompt_of(230)[:129], 1))
    turn(engine)
    engine.submit(push_submit(landing_elsewhere(fabric, 230), 230))
    engine.step()
    assert agent_of(engine, fabric).ready_calls[0][2] == 2


def test_offered_blocks_are_pushed_into_the_stores_landing() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16)
    prompt = prompt_of(200)
    engine.submit(submit_of(1, prompt, 1))
    turn(engine)
    ticket = landing_elsewhere(fabric, 192)
    engine.transfers.handle(PushOffer(ticket, chain_hashes(prompt)))
    assert held_blocks(engine) == 3
    while fabric.run_one():
        turn(engine)
    assert held_blocks(engine) == 0
    assert engine.transfers.drain_news()[-1] == PushEnded(ticket.transfer_id, ticket.size_bytes, "fake")


def test_an_offer_of_evicted_blocks_ends_without_a_push() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=16)
    ticket = landing_elsewhere(fabric, 192)
    engine.transfers.handle(PushOffer(ticket, chain_hashes(prompt_of(200))))
    (ended,) = engine.transfers.drain_news()
    assert isinstance(ended, PushEnded)
    assert ended.error is not None and "evicted" in ended.error
    assert held_blocks(engine) == 0


def test_counters_are_reported_when_they_change() -> None:
    fabric = make_fabric()
    engine = moving_engine(fabric, total_blocks=8)
    engine.submit(submit_of(1, prompt_of(100), 5, remote_prefill=True))
    reported = [step.transfers.open_landings for step in turn(engine).steps if step.transfers]
    engine.cancel(Cancel(1))
    turn(engine)
    fabric.run_one()
    reported += [step.transfers.open_landings for step in turn(engine).steps if step.transfers]
    assert reported == [1, 0]
