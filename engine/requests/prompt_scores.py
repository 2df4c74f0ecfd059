"""The log probabilities of a prompt's tokens, chunk by chunk."""

from mesh.domain.outputs import PromptLogprobs


class PromptScores:
    """Scores of one request's prompt, until its first token. The prompt is computed whole: cached tokens have no
    logits.
    """

    def __init__(self, alternatives: int) -> None:
        self.alternatives = alternatives
        self._parts: list[PromptLogprobs] = []

    def add(self, start: int, part: PromptLogprobs) -> None:
        """What the row that begins at `start` computed."""
        if not start:
            # A preempted prompt begins again.
            self._parts.clear()
        self._parts.append(part)

    def whole(self) -> PromptLogprobs:
        return PromptLogprobs.joined(self.alternatives, self._parts)
