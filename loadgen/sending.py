"""Sends jobs at their times, whatever became of those before, and a session's turns after their answers."""

import asyncio
import time
from collections.abc import Callable

from loadgen.client import LoadClient
from loadgen.plan import Plan
from loadgen.records import RequestRecord
from loadgen.workload import Answer, Job

# Called with how many requests were sent, how many of them have ended, and how many there will be.
Shown = Callable[[int, int, int], None]


class Sending:
    """One run of a plan; `records` has what was sent until now, in this order. Times count from its creation."""

    def __init__(self, client: LoadClient, planned: Plan, max_concurrency: int | None, shown: Shown) -> None:
        self.records: list[RequestRecord] = []
        self._client = client
        self._plan = planned
        # A session has one request in flight at a time.
        self._guard = asyncio.Semaphore(max_concurrency or len(planned.jobs))
        self._shown = shown
        self._ended = 0
        self._total = len(planned.jobs) * planned.turns
        self._start = time.perf_counter()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for job, time_s in zip(self._plan.jobs, self._plan.times_s, strict=True):
                tasks.create_task(self._send_turns(job, await self._due(job, time_s, 1)))

    async def _send_turns(self, job: Job, record: RequestRecord) -> None:
        """Send this request and, as each is answered, those that follow. A failed one ends the session."""
        while True:
            answer = await self._send(job, record)
            if job.following is None or record.finished_s is None:
                return
            turn = job.following(answer)
            job, record = turn.job, await self._due(turn.job, record.finished_s + turn.pause_s, record.turn + 1)

    async def _send(self, job: Job, record: RequestRecord) -> Answer:
        record.held_back = self._guard.locked()
        try:
            async with self._guard:
                return await self._client.send(job, record, self._clock)
        finally:
            self._ended += 1
            if record.finished_s is None:
                self._total -= self._plan.turns - record.turn
            self._show()

    async def _due(self, job: Job, time_s: float, turn: int) -> RequestRecord:
        """Wait until a request's time has come, and note that it is sent."""
        # Sleep even if the time has come, so that the requests already started can run.
        await asyncio.sleep(max(0.0, time_s - self._clock()))
        record = RequestRecord(len(self.records), time_s, job.max_tokens, woken_s=self._clock(), turn=turn)
        self.records.append(record)
        self._show()
        return record

    def _show(self) -> None:
        self._shown(len(self.records), self._ended, self._total)

    def _clock(self) -> float:
        return time.perf_counter() - self._start
