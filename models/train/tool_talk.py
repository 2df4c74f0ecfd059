"""Conversations with tools: calls, their results, answers to them, and questions that need no tool."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from eval.tasks import SHORT_TASKS, draw
from eval.tasks.problem import belongs_to_test
from gateway.tool_formats.choice import written_tools
from gateway.tool_formats.deepseek import V31
from gateway.tools import ToolCall
from models.train.small_talk import small_talk
from models.train.tool_offers import Call, Offer, draw_offer
from tools.chat import Turn

# Tasks whose problems are asked in conversations with tools too.
PLAIN_TASKS = ("add", "copy_text", "count_letter", "sort_words")
# Draws after which a tool counts as one without calls of the split.
CALLS_TRIED = 64
# What people add to a request, which asks for no second call.
REMARKS = ("Use the tool.", "Use your tools.", "Call the tool.", "Please use a tool for that.", "Thanks!")


@dataclass(frozen=True)
class ToolTalk:
    # In OpenAI's form.
    tools: Sequence[Mapping[str, Any]]
    # Every answer is to be learned. Only the last has thinking, if any has.
    turns: Sequence[Turn]

    @property
    def system(self) -> str:
        """The text that offers the tools, as the gateway writes it."""
        return written_tools(self.tools, V31)


def tool_talk(random: Random, *, held_out: bool) -> ToolTalk:
    count = random.choice((1, 1, 1, 2, 2, 3))
    offers = list({offer.name: offer for offer in (_offer(random, held_out=held_out) for _ in range(count))}.values())
    tools = [offer.tool for offer in offers]
    if random.random() < 0.35:
        return ToolTalk(tools, _thought(random, offers, held_out=held_out))
    rounds: list[Turn] = []
    for _ in range(random.choice((2, 3, 3, 4))):
        if random.random() < 0.25:
            rounds.append(_plain(random))
        rounds += _round(random, _calls(random, offers, held_out=held_out))
    return ToolTalk(tools, [Turn(turn.prompt, turn.reply) for turn in rounds])


def _thought(random: Random, offers: Sequence[Offer], *, held_out: bool) -> list[Turn]:
    """A turn with thinking, and those before it."""
    if random.random() < 0.3:
        return [_plain(random)]
    asked, answered = _round(random, _calls(random, offers, held_out=held_out))
    if random.random() < 0.6:
        return [asked]
    return [Turn(asked.prompt, asked.reply), answered]


def _calls(random: Random, offers: Sequence[Offer], *, held_out: bool) -> list[Call]:
    """The calls that one request asks for."""
    count = 2 if random.random() < 0.25 else 1
    return [_call(random, random.choice(offers), held_out=held_out) for _ in range(count)]


def _call(random: Random, offer: Offer, *, held_out: bool) -> Call:
    while not _fits(call := offer.call(random), held_out=held_out):
        pass
    return call


def _offer(random: Random, *, held_out: bool) -> Offer:
    """A tool that has calls of this split: some have too few to be in both."""
    while True:
        offer = draw_offer(random)
        if any(_fits(offer.call(random), held_out=held_out) for _ in range(CALLS_TRIED)):
            return offer


def _fits(call: Call, *, held_out: bool) -> bool:
    # A tool without parameters has but one call, which belongs to both splits.
    return call.arguments == "{}" or belongs_to_test("tool_call", call.key) == held_out


def _round(random: Random, calls: Sequence[Call]) -> list[Turn]:
    """The request with its calls, and their results with the answer."""
    requests = [call.request for call in calls]
    if random.random() < 0.2:
        requests.append(random.choice(REMARKS))
    made = V31.calls([ToolCall("", call.name, call.arguments) for call in calls])
    names = " and ".join(call.name for call in calls)
    return [
        Turn(" ".join(requests), made, f"I call {names}."),
        Turn(
            V31.outputs([call.output for call in calls]),
            "\n".join(map(_said, calls)),
            f"I report what {names} returned.",
        ),
    ]


def _said(call: Call) -> str:
    """The answer to one result."""
    if call.output.startswith("{"):
        ((name, value),) = json.loads(call.output).items()
        return f"The {name} is **{value}**."
    if call.output.startswith("Error: "):
        return f"{call.name} failed: {call.output.removeprefix('Error: ')}"
    return f"{call.name}: {call.output}"


def _plain(random: Random) -> Turn:
    """A turn that needs no tool."""
    if random.random() < 0.4:
        problem = draw(SHORT_TASKS[random.choice(PLAIN_TASKS)], random, held_out=False)
        return Turn(problem.prompt, problem.reply, problem.reasoning)
    return small_talk(random)
