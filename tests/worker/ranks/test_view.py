"""What a worker's service takes a rank to have: by its reports, and by what was submitted since."""

from engine.protocol.messages import StepResult
from mesh.domain.workers import WorkerLoad
from tests.support.decoding import READY
from tests.support.engines import prompt_of, submit_of
from worker.chains import Found
from worker.ranks.view import RankView


def report(view: RankView, load: WorkerLoad) -> None:
    view.observe(StepResult(1, [], load))


def test_requests_have_no_blocks_until_a_report_includes_them() -> None:
    view = RankView(READY)
    report(view, WorkerLoad(running_requests=0, free_blocks=90))
    for key, tokens in enumerate((640, 63, 64)):
        view.submitted(submit_of(key, prompt_of(tokens), 4))
    assert view.outlook(Found()).pending_blocks == 11 + 1 + 2
    # The rank knew the first one alone when this step ended.
    report(view, WorkerLoad(running_requests=1, free_blocks=79))
    assert view.outlook(Found()).pending_blocks == 1 + 2
    report(view, WorkerLoad(running_requests=3, free_blocks=76))
    assert view.outlook(Found()).pending_blocks == 0


def test_those_that_wait_take_what_the_rank_says() -> None:
    view = RankView(READY)
    for key in range(3):
        view.submitted(submit_of(key, prompt_of(640), 4))
    report(view, WorkerLoad(running_requests=1, waiting_requests=1, waiting_blocks=7, free_blocks=3))
    outlook = view.outlook(Found(2, 3))
    assert (outlook.pending_blocks, outlook.live_requests, outlook.free_blocks) == (7 + 11, 3, 3)
    assert (outlook.cached_blocks, outlook.host_blocks) == (2, 3)


def test_blocks_in_host_memory_follow_the_reports() -> None:
    view = RankView(READY)
    view.observe(StepResult(1, [], WorkerLoad(), hosted_blocks=[b"a", b"b"]))
    view.observe(StepResult(2, [], WorkerLoad(), hosted_blocks=[b"c"], unhosted_blocks=[b"a"]))
    assert view.hosted == {b"b", b"c"}
