"""Whether a card can multiply weights in the form in which a model keeps them. Pure."""

from engine.model.quantization import Quantization, Stored
from engine.settings.card import Card
from engine.settings.rules import HOPPER
from mesh.errors import ConfigError

# The first compute capability with products in FP8.
FIRST_FP8 = (8, 9)


def multiplies(kept: Quantization, card: Card) -> bool:
    """kept: the form of the weights on the card."""
    return _lack(kept, card) is None


def check_products(kept: Quantization, card: Card) -> None:
    """Raises ConfigError for a form that the card does not multiply: its kernels would fail while they are compiled or
    captured.
    """
    if (lack := _lack(kept, card)) is not None:
        left = "bf16, without quantizing it" if card.capability < FIRST_FP8 else "FP8 or bf16"
        raise ConfigError(f"{card.name} has no {lack}: serve a checkpoint in {left}")


def _lack(kept: Quantization, card: Card) -> str | None:
    major, minor = card.capability
    if Stored.FP8 in (kept.linear, kept.experts) and card.capability < FIRST_FP8:
        return f"products in FP8 (its compute capability is {major}.{minor}, and they begin at 8.9)"
    if kept.experts is Stored.INT4 and major != HOPPER:
        return "kernels for INT4 experts (deepmesh's are for Hopper: H100, H200, H20, H800)"
    return None
