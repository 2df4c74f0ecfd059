"""What the services pass on between a decode rank and a prefill rank, without the services."""

from msgspec.structs import replace

from engine.protocol.messages import FirstToken, LandingOpened, Output, PushTarget, Submit
from mesh.domain.sampling import StopConditions
from mesh.domain.targets import StoreTarget


def prefill_of(submit: Submit, opened: LandingOpened, fetch: StoreTarget | None = None) -> Submit:
    """The prompt of a request whose landing is open, as its prefill rank takes it."""
    return Submit(
        key=submit.key,
        request=replace(submit.request, stop=StopConditions(1), attempt=0),
        push=PushTarget(opened.ticket, opened.held_blocks),
        fetch=fetch,
    )


def first_token_of(output: Output) -> FirstToken:
    """A prefill rank's answer, as the decode rank takes it."""
    return FirstToken(
        output.key,
        output.token_ids[0],
        output.logprobs[0] if output.logprobs else None,
        output.cached_tokens or 0,
        output.store_cached_tokens or 0,
        output.prompt_logprobs,
        output.drafts_end,
    )
