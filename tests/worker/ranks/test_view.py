"""What a worker's service takes a rank to have: by its reports, and by what was submitted since."""

from engine.protocol.messages import StepResult
from mesh.domain.workers import WorkerLoad
from tests.support.decoding import READY
from tests.support.engines import prompt_of, submit_of
from worker.ranks.view import RankView


def report(view: RankView, load: WorkerLoad) -> None:
    view.observe(StepResult(1, [], load))


def test_requests_have_no_blocks_until_a_report_includes_them() -> None:
    view = RankView(READY)
    report(view, WorkerLoad(running_requests=0, free_blocks=90))
    for key, tokens in enumerate((640, 63, 64)):
        view.submitted(submit_of(key, prompt_of(tokens), 4))
    assert view.outlook(0).pending_blocks == 11 + 1 + 2
    # The rank knew the first one alone when this step ended.
    report(view, WorkerLoad(running_requests=1, free_blocks=79))
    assert view.outlook(0).pending_blocks == 1 + 2
    report(view, WorkerLoad(running_requests=3, free_blocks=76))
    assert view.outlook(0).pending_blocks == 0


def test_those_that_wait_take_what_the_rank_says() -> None:
    view = RankView(READY)
    for key in range(3):
        view.submitted(submit_of(key, prompt_of(640), 4))
    report(view, WorkerLoad(running_requests=1, waiting_requests=1, waiting_blocks=7, free_blocks=3))
    outlook = view.outlook(2)
    assert (outlook.pending_blocks, outlook.live_requests, outlook.free_blocks) == (7 + 11, 3, 3)
