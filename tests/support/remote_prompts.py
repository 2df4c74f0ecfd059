"""The messages that services pass between a decode rank and a prefill rank, made without services."""

from msgspec.structs import replace

from decode_svc.requests import finish_with
from engine.protocol.messages import Cancel, FirstToken, LandingOpened, Output, PushTarget, Submit
from mesh.domain.sampling import StopConditions
from mesh.domain.targets import StoreTarget


def prefill_of(submit: Submit, opened: LandingOpened, fetch: StoreTarget | None = None) -> Submit:
    """The message that gives a prefill rank the prompt of a request whose landing is open."""
    return Submit(
        key=submit.key,
        request=replace(submit.request, stop=StopConditions(1), attempt=0),
        push=PushTarget(opened.ticket, opened.held_blocks),
        fetch=fetch,
    )


def first_output_of(output: Output, submit: Submit, eos_token_ids: frozenset[int] = frozenset()) -> Output:
    """The decode service's report of a prefill rank's answer, for a request that was submitted with `submit`."""
    return replace(output, finish=finish_with(output.token_ids[0], submit.request.stop, eos_token_ids))


def first_token_of(first: Output) -> FirstToken | Cancel:
    """The message about the first token that the decode rank gets."""
    return Cancel(first.key) if first.finish else FirstToken(first.key, first.token_ids[0], first.drafts_end)
