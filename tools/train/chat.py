"""How a conversation is written for the model: DeepSeek's form, as the tokenizer's chat template renders it."""

from dataclasses import dataclass

BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, THINK_END = "<think>", "</think>"

# Earlier answers stand without their thinking. The model thinks unless `thinking` is given as false.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- message['content'] -}}
{%- elif message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<｜Assistant｜></think>' + message['content'].split('</think>')[-1] + eos_token -}}
{%- else -%}
{{- raise_exception('unknown role: ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜>' + ('</think>' if thinking is defined and not thinking else '<think>') -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class Turn:
    """What the user says, and what is answered. `thinking` is None where the answer comes without."""

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
    """A document to learn as it stands."""
    return Example(BEGIN, f"{text}{END}")
