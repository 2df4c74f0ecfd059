"""The interface that the endpoint needs from a request's body, whichever API the body belongs to."""

from abc import abstractmethod

from gateway.asks import Ask
from gateway.openai.sampling import SamplingFields


class RequestBody(SamplingFields, kw_only=True):
    """The fields that every generating endpoint has. Types are strict: "5" is not a number."""

    model: str = ""
    stream: bool | None = None
    # Share cached prefixes only with requests that have the same salt.
    cache_salt: str | None = None
    # Requests of one API key run in the order of this number, lowest first.
    priority: int | None = None
    # Whether the attention of a long prompt may skip positions that hardly count; by default the workers' setting.
    sparse_prefill: bool | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def choices_per_prompt(self) -> int:
        return 1

    def take(self, content: bytes) -> None:
        """Take what the fields do not hold from the JSON that the body was decoded from."""

    @abstractmethod
    def asks(self, request_id: str) -> list[Ask]:
        """The request in the gateway's terms: one ask for each prompt. Raises InvalidRequest."""
