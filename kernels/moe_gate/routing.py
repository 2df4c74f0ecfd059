"""How a model's gate chooses experts."""

from dataclasses import dataclass

# The choice of a token that no expert is to compute.
NO_EXPERT = -1


@dataclass(frozen=True, slots=True)
class Routing:
    """The settings of a gate, the same for all tokens."""

    experts_per_token: int
    # Experts form this many equal groups. A token may use `groups_per_token` of them: those whose two best sums of
    # affinity and bias are largest.
    groups: int
    groups_per_token: int
    # Whether a token's weights are normalized to sum to 1, and the factor that multiplies them in either case.
    normalize: bool
    scaling: float
    # Shared experts: they have no logits, are numbered after the others, and always have a weight of 1.
    shared: int

    @property
    def places(self) -> int:
        """The number of a token's experts, including shared ones."""
        return self.experts_per_token + self.shared
