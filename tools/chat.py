"""How a conversation is written for the model: DeepSeek's form, as the tokenizer's chat template renders it."""

from dataclasses import dataclass

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
    """Text to train on: `context` is given, `completion` is learned."""

    context: str
    completion: str


def conversation(turns: list[Turn], system: str = "") -> Example:
    """The last turn's answer is learned; the turns before are given."""
    *earlier, last = turns
    history = "".join(f"{USER}{turn.prompt}{ASSISTANT}{THINK_END}{turn.reply}{END}" for turn in earlier)
    opening = f"{BEGIN}{system}{history}{USER}{last.prompt}{ASSISTANT}"
    if last.thinking is None:
        return Example(f"{opening}{THINK_END}", f"{last.reply}{END}")
    return Example(f"{opening}{THINK}", f"{last.thinking}{THINK_END}{last.reply}{END}")


def plain_text(text: str) -> Example:
    """A document that is learned whole."""
    return Example(BEGIN, f"{text}{END}")
