"""How many experts a model's tokens go to, and from which groups."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Routing:
    """The settings of a gate, the same for all tokens."""

    experts_per_token: int
    # The experts lie in so many equal groups. A token may use some of them: those whose two best sums of affinity and
    # bias are largest.
    groups: int
    groups_per_token: int
    # Whether a token's weights are made to sum to 1; then, or not, what multiplies them.
    normalize: bool
    scaling: float
    # Experts behind the chosen that no logits stand for, numbered after the others, each of weight 1 whatever the rest.
    shared: int

    @property
    def places(self) -> int:
        """Experts of a token, the shared ones too."""
        return self.experts_per_token + self.shared
