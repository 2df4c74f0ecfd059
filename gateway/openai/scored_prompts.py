"""The log probabilities of prompts, in the forms of completions and chats."""

from collections.abc import Iterator

from gateway.openai.answer_bodies import PromptTokenLogprob
from gateway.openai.token_texts import spelled_token
from gateway.prompts.tokenizer import Tokenizer
from gateway.text.delta import ScoredPrompt
from mesh.domain.outputs import Logprobs


def scored_tokens(prompt: ScoredPrompt) -> Iterator[tuple[int, int, Logprobs]]:
    """Each token from the second on, with its rank and its log probabilities."""
    for token_id, (rank, entry) in zip(prompt.token_ids[1:], prompt.logprobs.positions(), strict=True):
        yield token_id, rank, entry


def prompt_logprobs(
    tokenizer: Tokenizer | None, prompt: ScoredPrompt, count: int
) -> list[dict[str, PromptTokenLogprob] | None]:
    """The report in vLLM's form: at each position the `count` likeliest tokens and the prompt's own, by id; null for
    the first token, which has nothing before it.
    """
    report: list[dict[str, PromptTokenLogprob] | None] = [None]
    for token_id, rank, entry in scored_tokens(prompt):
        found = {token_id: PromptTokenLogprob(entry.logprob, rank, spelled_token(tokenizer, token_id)[0])}
        for place, (other, logprob) in enumerate(entry.top, start=1):
            if place <= count and other != token_id:
                found[other] = PromptTokenLogprob(logprob, place, spelled_token(tokenizer, other)[0])
        report.append({str(each): scored for each, scored in found.items()})
    return report
