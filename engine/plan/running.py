"""Requests that take part in steps."""

from engine.requests.request import Request
from mesh.domain.sparse_prefill import sparse_part


class Running:
    """Requests with one token left to compute decode; the others are prompts.

    A request whose last token is in flight is in neither list, and no step takes it on again.
    """

    def __init__(self) -> None:
        self.decoding: list[Request] = []
        self.prompts: list[Request] = []

    @property
    def prompt_tokens(self) -> int:
        """Tokens left to compute in prompts."""
        return sum(request.progress.left for request in self.prompts)

    @property
    def sparse_tokens(self) -> int:
        """How many of the `prompt_tokens` will be attended to sparsely."""
        return sum(
            sparse_part(request.progress.computed_at_most, request.progress.tokens_at_most, request.sparse_from)
            for request in self.prompts
        )

    def add(self, request: Request) -> None:
        (self.decoding if request.progress.left == 1 else self.prompts).append(request)

    def remove(self, request: Request) -> None:
        """Take the request out of the steps, if it is in them."""
        for running in (self.prompts, self.decoding):
            if request in running:
                running.remove(request)

    def sort(self) -> None:
        """After a launch: computed prompts begin to decode, and requests whose last token is in flight leave."""
        running = [request for request in (*self.decoding, *self.prompts) if not request.will_end]
        self.decoding = [request for request in running if request.progress.left == 1]
        self.prompts = [request for request in running if request.progress.left > 1]
