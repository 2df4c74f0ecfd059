"""How a conversation is written for the model: DeepSeek's form, as the tokenizer's chat template renders it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tools.tokenizer_files import BEGIN, END, THINKS_UNLESS_TOLD

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, THINK_END = "<think>", "</think>"
# The model thinks unless told not to.
CHAT_TEMPLATE = THINKS_UNLESS_TOLD


@dataclass(frozen=True)
class Turn:
    """What the user says, and the answer. `thinking` is None if the answer has none."""

    prompt: str
    reply: str
    thinking: str | None = None


@dataclass(frozen=True)
class Example:
    """Text to train on: `context` is given, `completion` is learned. `earlier`: what stands before, in such pairs."""

    context: str
    completion: str
    earlier: Sequence[tuple[str, str]] = ()


def conversation(turns: Sequence[Turn], system: str = "") -> Example:
    """The last turn's answer is learned; the turns before are given."""
    *earlier, last = turns
    history = "".join(f"{_asked(turn)}{THINK_END}{turn.reply}{END}" for turn in earlier)
    return _answered(f"{BEGIN}{system}{history}{_asked(last)}", last)


def learned_conversation(turns: Sequence[Turn], system: str = "") -> Example:
    """Every turn's answer is learned. Only the last may have thinking, for that of earlier ones is not written."""
    *earlier, last = turns
    assert all(turn.thinking is None for turn in earlier)
    pairs = [(f"{_asked(turn)}{THINK_END}", f"{turn.reply}{END}") for turn in earlier]
    opening = f"{BEGIN}{system}"
    if pairs:
        pairs[0] = (opening + pairs[0][0], pairs[0][1])
        opening = ""
    return replace(_answered(f"{opening}{_asked(last)}", last), earlier=pairs)


def _asked(turn: Turn) -> str:
    return f"{USER}{turn.prompt}{ASSISTANT}"


def _answered(asked: str, turn: Turn) -> Example:
    if turn.thinking is None:
        return Example(f"{asked}{THINK_END}", f"{turn.reply}{END}")
    return Example(f"{asked}{THINK}", f"{turn.thinking}{THINK_END}{turn.reply}{END}")


def plain_text(text: str) -> Example:
    """A document that is learned whole."""
    return Example(BEGIN, f"{text}{END}")
