"""Whether a card can multiply weights in the form in which a model keeps them. Pure."""

from engine.model.quantization import Quantization, Stored
from engine.settings.card import Card
from mesh.errors import ConfigError

# The first compute capability with products in FP8.
FIRST_FP8 = (8, 9)


def check_products(kept: Quantization, card: Card) -> None:
    """kept: the form of the weights on the card. Raises ConfigError: the kernels would not compile at the start."""
    if Stored.FP8 in (kept.linear, kept.experts) and card.capability < FIRST_FP8:
        major, minor = card.capability
        raise ConfigError(
            f"{card.name} has no products in FP8 (its compute capability is {major}.{minor}, and they begin at 8.9):"
            " serve a checkpoint in bf16, without quantizing it"
        )
