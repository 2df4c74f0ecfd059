"""How long answers are, per model, as gateways report."""


class OutputLengths:
    """Exponentially smoothed mean of generated tokens per finished request, and the share that stopped by
    themselves.
    """

    def __init__(self, smoothing: float = 0.05, max_models: int = 1024) -> None:
        self._smoothing = smoothing
        self._max_models = max_models
        self._means: dict[str, float] = {}
        self._stopping: dict[str, float] = {}

    def observe(self, model: str, output_tokens: int, max_tokens: int) -> None:
        mean, stopped = self._means.get(model), float(output_tokens < max_tokens)
        if mean is not None:
            self._means[model] = mean + self._smoothing * (output_tokens - mean)
            self._stopping[model] += self._smoothing * (stopped - self._stopping[model])
        elif len(self._means) < self._max_models:
            self._means[model], self._stopping[model] = float(output_tokens), stopped

    def mean(self, model: str) -> float | None:
        """Mean tokens of a finished request; None before the first report."""
        return self._means.get(model)

    def stopping(self, model: str) -> float:
        """Share of answers that ended before they reached their token limit; 1 while unknown."""
        return self._stopping.get(model, 1.0)
