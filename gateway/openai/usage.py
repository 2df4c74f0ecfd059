"""Counts the tokens of a request with several choices."""

from gateway.openai.answer_bodies import CompletionDetails, PromptDetails, UsageBody
from gateway.text.delta import Usage


class UsageTally:
    """Adds up what the choices report. Choices of one prompt share its tokens, which count once."""

    def __init__(self, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._latest: dict[int, Usage] = {}

    def note(self, index: int, usage: Usage) -> None:
        """Take the latest counts of choice `index`."""
        self._latest[index] = usage

    def total(self) -> UsageBody:
        every = self._latest.values()
        prompts: dict[int, Usage] = {}
        for index in sorted(self._latest):
            prompts.setdefault(index // self._choices_per_prompt, self._latest[index])
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts.values())
        completion_tokens = sum(usage.completion_tokens for usage in every)
        return UsageBody(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptDetails(sum(usage.cached_tokens for usage in prompts.values())),
            completion_tokens_details=CompletionDetails(sum(usage.reasoning_tokens for usage in every)),
        )
