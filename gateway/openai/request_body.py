"""What the endpoint asks of a request's body, whichever API it belongs to."""

from abc import abstractmethod

from gateway.asks import Ask
from gateway.openai.sampling import SamplingFields


class RequestBody(SamplingFields, kw_only=True):
    """The fields that every generating endpoint has. Types are strict: "5" is no number."""

    model: str = ""
    stream: bool | None = None
    # Share cached prefixes only with requests that have the same one.
    cache_salt: str | None = None
    # Among the requests of the same API key the lowest goes first.
    priority: int | None = None
    # Whether attention of a long prompt leaves out what hardly counts; by default as the workers are configured.
    sparse_prefill: bool | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def choices_per_prompt(self) -> int:
        return 1

    @abstractmethod
    def asks(self, request_id: str) -> list[Ask]:
        """The same in the gateway's terms, for each prompt. Raises InvalidRequest."""
