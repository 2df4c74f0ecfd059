"""The log probabilities of completions, in OpenAI's form."""

from collections import Counter
from collections.abc import Mapping, Sequence

from gateway.openai.answer_bodies import CompletionLogprobs
from gateway.openai.scored_prompts import scored_tokens
from gateway.openai.token_texts import spelled_token
from gateway.prompts.tokenizer import Tokenizer
from gateway.text.delta import ScoredPrompt
from mesh.domain.outputs import Logprobs


class CompletionReports:
    """The reports of one request's choices, delta by delta."""

    def __init__(self, tokenizer: Tokenizer | None, count: int | None) -> None:
        """count: number of alternatives for each token of a prompt that the text begins with; None leaves the prompt
        out.
        """
        self._tokenizer = tokenizer
        self._count = count
        # Characters of the tokens reported so far, by choice.
        self._offsets: Counter[int] = Counter()

    def of(
        self,
        index: int,
        token_ids: Sequence[int],
        entries: Sequence[Logprobs],
        text: str,
        prompt: ScoredPrompt | None,
    ) -> CompletionLogprobs:
        """The report for the next tokens of choice `index`; `text` begins with the prompt if `prompt` is given."""
        report = CompletionLogprobs([], [], [], [])
        if prompt is not None and self._count is not None:
            self._begin(report, index, prompt, text)
        for token_id, entry in zip(token_ids, entries, strict=True):
            self._add(report, index, token_id, entry.logprob, dict(entry.top))
        return report

    def _begin(self, report: CompletionLogprobs, index: int, prompt: ScoredPrompt, text: str) -> None:
        self._add(report, index, prompt.token_ids[0], None, None)
        if not text.startswith(report.tokens[0]):
            # The beginning-of-sequence token is not part of the text that the client sent.
            self._offsets[index] = 0
        for token_id, _, entry in scored_tokens(prompt):
            self._add(report, index, token_id, entry.logprob, dict(list(entry.top)[: self._count]))

    def _add(
        self,
        report: CompletionLogprobs,
        index: int,
        token_id: int,
        logprob: float | None,
        top: Mapping[int, float] | None,
    ) -> None:
        text, _ = spelled_token(self._tokenizer, token_id)
        report.tokens.append(text)
        report.token_logprobs.append(logprob)
        spelled = None if top is None else {spelled_token(self._tokenizer, each)[0]: top[each] for each in top}
        report.top_logprobs.append(spelled)
        report.text_offset.append(self._offsets[index])
        self._offsets[index] += len(text)
