"""Workers of several ranks, which are threads of the test. A rank has an engine or follows that of its TP group."""

import time
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import HashStore

from bench.rank.following import follow
from engine.config import EngineConfig
from engine.engine import Engine
from engine.parallel.hosts_lockstep import agreement_of
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.protocol.messages import Submit
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from engine.step.agreement import Agreement
from engine.step.shape import StepShape
from tests.support.engines import Transcript
from tests.support.exchanges import exchange_of
from tests.support.rank_threads import on_each_rank

# Called by each rank between two steps.
BetweenSteps = Callable[[Engine, Transcript], None]
# Called by each rank with its backend before it serves.
Prepare = Callable[[ModelBackend], None]


class _NeverDue:
    """engine.step.agreement.Agreement of a rank that never says that others wait for it.

    An engine counts it as work if other ranks wait for its rank, and ranks that want to stop wait at every step. A rank
    whose requests have ended would therefore go on for as long as another rank came to each step before it.
    """

    due = False

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def agree(self, proposal: StepShape) -> StepShape:
        return self._agreement.agree(proposal)


def run_layout(
    config: EngineConfig,
    submits: Sequence[Submit],
    between_steps: BetweenSteps = lambda engine, transcript: None,
    prepare: Prepare = lambda backend: None,
) -> Transcript:
    """Submit the requests at once to a worker of this layout, to its DP ranks in turn; returns what they get."""
    layout, store = Layout.of(config.parallel), HashStore()

    def run(peers: Peers) -> Transcript:
        return _run_rank(config, peers, store, submits, between_steps, prepare)

    transcripts = on_each_rank(layout, run, 60.0)
    merged = Transcript()
    for transcript in transcripts:
        merged.token_ids |= transcript.token_ids
        merged.cached_tokens |= transcript.cached_tokens
        merged.logprobs |= transcript.logprobs
        merged.ends |= transcript.ends
    return merged


def _run_rank(
    config: EngineConfig,
    peers: Peers,
    store: HashStore,
    submits: Sequence[Submit],
    between_steps: BetweenSteps,
    prepare: Prepare,
) -> Transcript:
    backend = ModelBackend(resolve(config, Hardware(0, 1 << 30)), exchange=exchange_of(peers, store))
    prepare(backend)
    agreement, place = agreement_of(peers), peers.in_worker
    if not place.leads:
        follow(backend, agreement, peers)
        return Transcript()
    engine = Engine(config, backend, time.monotonic, agreement=_NeverDue(agreement))
    for submit in submits:
        if submit.key % place.layout.dp == place.dp_index:
            engine.submit(submit)
    transcript = Transcript()
    while engine.has_work():
        transcript.record(engine.step())
        between_steps(engine, transcript)
    engine.stop()
    while not engine.stopped:
        # If other ranks still have work, these are dummy steps.
        engine.step()
    assert not any(engine.pool.references)
    return transcript
