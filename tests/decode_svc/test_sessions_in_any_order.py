"""Whatever comes in whatever order: every request ends once, and no token is lost, repeated or out of place."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_svc.requests import prefill_lost
from decode_svc.session import GatewayAttachment
from decode_svc.sessions import GatewaySessions
from engine.protocol.messages import Output
from mesh.domain.outputs import FinishReason
from mesh.domain.shares import ONE_TENANT
from mesh.domain.targets import WorkerTarget
from mesh.errors import EngineFailed, WorkerFull
from tests.support.decoding import PREFILL, FakePrompts, FakeRank, make_submission
from tests.support.scheduling import ManualClock

GRACE = 5.0
GATEWAYS = st.sampled_from("ab")


class Received:
    """What a gateway has of one request. `key` is the rank's, None where it never got there."""

    def __init__(self, prompt_tokens: int, key: int | None) -> None:
        self.prompt_tokens = prompt_tokens
        self.key = key
        self.tokens: list[int] = []
        self.ended = False


class Gateway:
    """The other end of a session."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.attachment: GatewayAttachment | None = None
        self.requests: dict[int, Received] = {}
        self._next_stream_id = 0

    def new_stream_id(self) -> int:
        self._next_stream_id += 1
        return self._next_stream_id


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rank = FakeRank()
        self.prompts = FakePrompts()
        self.clock = ManualClock()
        self.sessions = GatewaySessions(self.rank, self.prompts, self.clock, GRACE)
        self.gateways = {name: Gateway() for name in "ab"}
        for name in self.gateways:
            self.resume(name)

    @rule(name=GATEWAYS, change=st.sampled_from(["nothing", "nothing", "restart", "forget"]))
    def attach(self, name: str, change: str) -> None:
        gateway = self.gateways[name]
        if change == "restart":
            if gateway.attachment is not None:
                # The end of a process ends its stream.
                self.sessions.detach(gateway.attachment)
            gateway.incarnation += 1
            gateway.requests = {}
        elif change == "forget" and gateway.requests:
            del gateway.requests[min(gateway.requests)]
        self.resume(name)

    @precondition(lambda self: self.attached_now())
    @rule(data=st.data(), frame_lost=st.booleans())
    def detach(self, data: st.DataObject, frame_lost: bool) -> None:
        gateway = self.draw_attached(data)
        assert gateway.attachment is not None
        if frame_lost:
            gateway.attachment.session.take_frame()
        self.sessions.detach(gateway.attachment)
        gateway.attachment = None

    @precondition(lambda self: self.attached_now())
    @rule(
        data=st.data(),
        prompt=st.integers(1, 5),
        deadline=st.none() | st.integers(1, 9000),
        prefill=st.sampled_from([None, PREFILL]),
    )
    def submit(self, data: st.DataObject, prompt: int, deadline: int | None, prefill: WorkerTarget | None) -> None:
        gateway = self.draw_attached(data)
        assert gateway.attachment is not None
        before = set(self.rank.submitted)
        stream_id = gateway.new_stream_id()
        submission = make_submission(stream_id, token_ids=[7] * prompt, deadline_ms=deadline, prefill=prefill)
        self.sessions.submit(gateway.attachment, submission)
        key = next(iter(set(self.rank.submitted) - before), None)
        gateway.requests[stream_id] = Received(prompt, key)

    @precondition(lambda self: self.attached_now())
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        gateway = self.draw_attached(data)
        assert gateway.attachment is not None
        stream_id = gateway.new_stream_id()
        self.sessions.refuse(gateway.attachment, make_submission(stream_id), WorkerFull("full"))
        gateway.requests[stream_id] = Received(3, None)

    @precondition(lambda self: self.attached_now())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        gateway = self.draw_attached(data)
        assert gateway.attachment is not None
        if gateway.requests:
            self.sessions.cancel(gateway.attachment, data.draw(st.sampled_from(sorted(gateway.requests))))

    @precondition(lambda self: self.rank.running and not self.rank.dead)
    @rule(finish=st.sampled_from([None, None, "stop", "length"]), tokens=st.integers(1, 3), everyone=st.booleans())
    def step(self, finish: str | None, tokens: int, everyone: bool) -> None:
        outputs = []
        for key in sorted(self.rank.running) if everyone else [min(self.rank.running)]:
            if key in self.rank.cancelled:
                outputs.append(self.rank.output(key, 0, "cancelled"))
            else:
                outputs.append(self.rank.output(key, tokens, finish))
        self.sessions.on_step(self.rank.step(*outputs))

    @rule(name=GATEWAYS)
    def read(self, name: str) -> None:
        gateway = self.gateways[name]
        if gateway.attachment is None or (frame := gateway.attachment.session.take_frame()) is None:
            return
        assert frame.outputs
        for output in frame.outputs:
            received = gateway.requests[output.stream_id]
            assert not received.ended
            assert output.first_position == received.prompt_tokens + len(received.tokens)
            assert output.token_ids or output.terminal is not None
            if received.key is not None:
                start = len(received.tokens)
                assert list(output.token_ids) == self.rank.tokens(received.key, start, len(output.token_ids))
            received.tokens.extend(output.token_ids)
            received.ended = output.terminal is not None

    @rule(name=GATEWAYS)
    def acknowledge(self, name: str) -> None:
        gateway = self.gateways[name]
        if gateway.attachment is not None:
            ended = [stream_id for stream_id, received in gateway.requests.items() if received.ended]
            self.sessions.acknowledge(gateway.attachment, ended)
            for stream_id in ended:
                del gateway.requests[stream_id]

    @precondition(lambda self: self.prompts.expected)
    @rule(data=st.data())
    def lose_a_prompt(self, data: st.DataObject) -> None:
        self.sessions.lose_prompt(
            data.draw(st.sampled_from(sorted(self.prompts.expected))), prefill_lost(PREFILL, "it died")
        )

    @precondition(lambda self: self.without_tokens())
    @rule(data=st.data(), finish=st.sampled_from([None, None, FinishReason.STOP]))
    def draw_a_first_token(self, data: st.DataObject, finish: FinishReason | None) -> None:
        key = data.draw(st.sampled_from(self.without_tokens()))
        position = len(self.rank.submitted[key].request.token_ids)
        self.sessions.on_first_token(Output(key, position, self.rank.tokens(key, 0, 1), cached_tokens=0, finish=finish))
        assert (key in self.prompts.expected) == (finish is None)

    @rule(seconds=st.sampled_from([0.001, 1.0, GRACE]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.sessions.expire()

    # Late: what follows is dull.
    @precondition(lambda self: self.clock.now > 1040)
    @rule()
    def kill_the_rank(self) -> None:
        self.rank.dead = True
        self.sessions.fail_all(EngineFailed("gone"))

    @invariant()
    def no_request_runs_that_nobody_waits_for(self) -> None:
        running = set() if self.rank.dead else set(self.rank.running) - set(self.rank.cancelled)
        assert len(running) <= self.sessions.live_requests
        assert self.sessions.idle.is_set() == (self.sessions.live_requests == 0)

    @invariant()
    def a_prompt_is_expected_only_for_a_request_that_runs(self) -> None:
        assert set(self.prompts.expected) <= set(self.rank.running)
        assert len(self.prompts.expected) <= self.sessions.live_requests

    @invariant()
    def a_gateway_that_is_attached_is_owed_exactly_what_it_waits_for(self) -> None:
        for gateway in self.gateways.values():
            if gateway.attachment is not None:
                assert set(gateway.attachment.session.requests) == set(gateway.requests)

    def without_tokens(self) -> list[int]:
        """Keys of requests whose prompts are computed elsewhere."""
        return [key for key in sorted(self.prompts.expected) if self.rank.running[key] == 0]

    def attached_now(self) -> list[str]:
        return [name for name, gateway in self.gateways.items() if gateway.attachment is not None]

    def draw_attached(self, data: st.DataObject) -> Gateway:
        return self.gateways[data.draw(st.sampled_from(self.attached_now()))]

    def resume(self, name: str) -> None:
        gateway = self.gateways[name]
        for stream_id in [stream_id for stream_id, received in gateway.requests.items() if received.ended]:
            del gateway.requests[stream_id]
        resume = {
            stream_id: received.prompt_tokens + len(received.tokens) for stream_id, received in gateway.requests.items()
        }
        gateway.attachment = self.sessions.attach(name, str(gateway.incarnation), resume)

    def teardown(self) -> None:
        """The rank dies, everyone comes back and reads to the end: each request has its end, and nothing is kept."""
        self.rank.dead = True
        self.sessions.fail_all(EngineFailed("gone"))
        for name, gateway in self.gateways.items():
            self.resume(name)
            self.read(name)
            assert all(received.ended for received in gateway.requests.values())
            self.acknowledge(name)
            assert gateway.attachment is not None
            backlog = self.sessions.backlog(gateway.attachment, ONE_TENANT)
            assert (backlog.live_requests, backlog.queued_prefill_tokens, backlog.kept_tokens) == (0, 0, 0)
        assert self.sessions.kept_requests == 0
        assert not self.prompts.expected


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40)
