"""How long answers are, per model, as gateways report it."""


class OutputLengths:
    """Exponentially smoothed mean of generated tokens per finished request."""

    def __init__(self, smoothing: float = 0.05, max_models: int = 1024) -> None:
        self._smoothing = smoothing
        self._max_models = max_models
        self._means: dict[str, float] = {}

    def observe(self, model: str, output_tokens: int) -> None:
        mean = self._means.get(model)
        if mean is not None:
            self._means[model] = mean + self._smoothing * (output_tokens - mean)
        elif len(self._means) < self._max_models:
            self._means[model] = float(output_tokens)

    def mean(self, model: str) -> float | None:
        """Mean tokens of a finished request; None while none was reported."""
        return self._means.get(model)
