"""What the load generator needs of an endpoint, whatever its protocol."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from loadgen.records import RequestRecord
from loadgen.workload import Answer, Job

# Seconds since the run's start.
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Target:
    """What an endpoint serves. `vocabulary_size` is None if the endpoint does not say."""

    model: str
    vocabulary_size: int | None


class LoadClient(Protocol):
    """A connection to one endpoint, used by any number of requests at once."""

    async def discover(self) -> Target:
        """The model to ask. Raises EndpointUnavailable, or UnknownModel if the endpoint does not serve it."""
        ...

    async def send(self, job: Job, record: RequestRecord, clock: Clock) -> Answer:
        """Send one request, read its stream to the end, and write both tokens and failures to `record`.

        Returns the answer as far as it arrived, empty if nothing follows the job.
        """
        ...

    async def close(self) -> None: ...
