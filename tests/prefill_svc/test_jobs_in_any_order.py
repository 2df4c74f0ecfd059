"""Whatever comes in whatever order: a prompt ends once, and nothing is kept of it when its call is over."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.protocol.messages import Output, Refusal
from mesh.domain.outputs import FinishReason
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.shares import Share
from mesh.errors import EngineFailed, InvalidRequest, MeshError
from prefill_svc.jobs import Jobs
from prefill_svc.prompts import Job, Prompt
from tests.support.decoding import FakeRank
from tests.support.prefilling import make_ticket
from tests.support.scheduling import ManualClock
from transfer.events import PushEnded


class Call:
    """A caller's view of its job."""

    def __init__(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.loop = loop
        self.pushed = False
        self.heard: list[object] = []

    @property
    def over(self) -> bool:
        return bool(self.heard) and isinstance(self.heard[-1], MeshError | PushEnded)

    def listen(self) -> None:
        """Take every event that is there."""
        while (event := self._next()) is not None:
            assert not self.over, "an event after the end"
            self.heard.append(event)

    def _next(self) -> object | None:
        task = self.loop.create_task(self.job.next_event())
        self.loop.run_until_complete(asyncio.wait({task}, timeout=0))
        if not task.done():
            task.cancel()
            self.loop.run_until_complete(asyncio.wait({task}))
            return None
        return task.exception() or task.result()


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.rank = FakeRank()
        self.clock = ManualClock()
        self.jobs = Jobs(self.rank, self.clock)
        self.calls: list[Call] = []
        self.names = 0

    @rule(tokens=st.integers(1, 200), again=st.booleans())
    def submit(self, tokens: int, again: bool) -> None:
        if again and self.calls:
            ticket = self.calls[0].job.prompt.ticket
        else:
            self.names += 1
            ticket = make_ticket(tokens, name=self.names)
        prompt = Prompt(TokenRequest("r", [1] * tokens, Sampling(), StopConditions(1)), ticket, 0, None)
        try:
            self.calls.append(Call(self.jobs.submit(prompt), self.loop))
        except InvalidRequest:
            assert again

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), outcome=st.sampled_from(["token", "token", "refusal", "cancelled"]))
    def output(self, data: st.DataObject, outcome: str) -> None:
        key = self.draw(data).job.key
        said = {
            "token": Output(key, 1, [7], finish=FinishReason.LENGTH),
            "refusal": Output(key, 1, [], refusal=Refusal("INVALID_REQUEST", "no")),
            "cancelled": Output(key, 1, [], finish=FinishReason.CANCELLED),
        }
        self.jobs.on_step(self.rank.step(said[outcome]))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), error=st.sampled_from([None, None, "lost"]))
    def end_the_push(self, data: st.DataObject, error: str | None) -> None:
        call = self.draw(data)
        if not call.pushed:
            call.pushed = True
            self.jobs.on_push_ended(PushEnded(call.job.transfer_id, 1, "tcp", error))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        call = self.draw(data)
        self.jobs.end(call.job)
        self.calls.remove(call)
        assert call.job.key in self.rank.cancelled
        # Late news.
        self.jobs.on_push_ended(PushEnded(call.job.transfer_id, 1, "tcp"))
        self.jobs.on_step(self.rank.step(Output(call.job.key, 1, [7], finish=FinishReason.LENGTH)))

    @rule(seconds=st.sampled_from([0.1, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.jobs.expire()

    @rule()
    def lose_the_rank(self) -> None:
        self.jobs.fail_all(EngineFailed("gone"))

    @invariant()
    def what_is_queued_has_no_first_token(self) -> None:
        waiting = [call.job for call in self.calls if not call.job.has_first_token]
        backlog = self.jobs.backlog(Share())
        assert backlog.queued_tokens == sum(len(job.prompt.request.token_ids) for job in waiting)
        assert backlog.live_prompts == self.jobs.live_prompts == len(self.calls)
        assert self.jobs.idle.is_set() == (not self.calls)

    @invariant()
    def a_job_that_is_done_was_computed_and_pushed(self) -> None:
        for call in self.calls:
            call.listen()
            if call.over and isinstance(call.heard[-1], PushEnded):
                assert sum(isinstance(event, Output) for event in call.heard) == 1
                assert call.pushed

    def teardown(self) -> None:
        self.loop.close()

    def draw(self, data: st.DataObject) -> Call:
        return data.draw(st.sampled_from(self.calls))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30)
