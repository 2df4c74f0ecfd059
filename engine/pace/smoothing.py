"""Running means."""

from collections.abc import Iterable


class SmoothedRatio:
    """A quotient of two exponentially decayed sums, so that small observations weigh little."""

    def __init__(self) -> None:
        self._numerator = 0.0
        self._denominator = 0.0

    def observe(self, numerator: float, denominator: float, decay: float) -> None:
        self._numerator = self._numerator * decay + numerator
        self._denominator = self._denominator * decay + denominator

    def observe_all(self, numerators: Iterable[float], denominator: float, decays: Iterable[float]) -> None:
        """Observe these one after the other."""
        above, below = self._numerator, self._denominator
        for numerator, decay in zip(numerators, decays, strict=True):
            above = above * decay + numerator
            below = below * decay + denominator
        self._numerator, self._denominator = above, below

    def observe_equal(self, numerator: float, denominator: float, decays: Iterable[float]) -> None:
        """Observe the same values once for each decay."""
        above, below = self._numerator, self._denominator
        for decay in decays:
            above = above * decay + numerator
            below = below * decay + denominator
        self._numerator, self._denominator = above, below

    @property
    def value(self) -> float | None:
        """None while unknown."""
        return self._numerator / self._denominator if self._numerator and self._denominator else None
