"""The texts of single tokens, as clients read them."""

from collections.abc import Iterable

from gateway.openai.answer_bodies import TokenLogprob, TopLogprob
from gateway.prompts.tokenizer import Tokenizer
from mesh.domain.outputs import Logprobs


def spelled_token(tokenizer: Tokenizer | None, token_id: int) -> tuple[str, list[int]]:
    """A token's text and bytes; its number as text if the model has no tokenizer."""
    if tokenizer is None:
        return f"token_id:{token_id}", []
    return tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))


def token_logprobs(tokenizer: Tokenizer | None, entries: Iterable[tuple[int, Logprobs]]) -> list[TokenLogprob]:
    """Tokens with their log probabilities and their likeliest alternatives, in the form of chats."""
    report = []
    for token_id, entry in entries:
        text, spelled = spelled_token(tokenizer, token_id)
        top = []
        for other, logprob in entry.top:
            other_text, other_bytes = spelled_token(tokenizer, other)
            top.append(TopLogprob(other_text, logprob, other_bytes))
        report.append(TokenLogprob(text, entry.logprob, spelled, top))
    return report
