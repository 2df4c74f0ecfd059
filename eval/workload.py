"""Load made of the tasks, with prefixes shared as in real traffic: system prompts of a few applications, documents
that many users ask about, conversations that go on.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from eval.tasks import LONG_TASKS, SHORT_TASKS, draw, draw_long
from eval.tasks.retrieval import ASK_NEEDLE

APPLICATIONS, DOCUMENTS = 12, 16
INSTRUCTIONS = (
    "You are a careful assistant that thinks step by step.",
    "You are a friendly teacher.",
    "Answer the user's questions.",
    "Be brief and exact.",
)
# How many solved examples a system prompt has. With them it takes from a dozen to about a thousand tokens.
EXAMPLES = (0, 0, 1, 2, 4, 6, 10, 16)
# Characters of a document: the median and sigma of a log-normal distribution, and the most.
MEDIAN_DOCUMENT, DOCUMENT_SIGMA, LONGEST_DOCUMENT = 5000, 0.8, 24_000
# Shares of the requests that are the next turn of an earlier conversation, or a question about a document; the others
# begin a conversation.
FOLLOW_UP_SHARE, DOCUMENT_SHARE = 0.35, 0.15
LIVE_CONVERSATIONS, MOST_TURNS = 64, 5
# An answer may have as many tokens as its solution has in a small vocabulary: one for this many characters.
CHARACTERS_PER_TOKEN = 2
FACT = re.compile(r"The access code of (the [a-z ]+) is (\w+)\.")

Item = TypeVar("Item")


@dataclass(frozen=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True)
class Chat:
    """One request; `max_tokens` leaves room for the solution with its reasoning."""

    messages: tuple[ChatMessage, ...]
    max_tokens: int


@dataclass(frozen=True)
class _Exchange:
    question: str
    reasoning: str
    reply: str


def task_chats(seed: int) -> Iterator[Chat]:
    """Endless chats. Equal seeds give equal chats."""
    traffic = _Traffic(Random(f"workload/{seed}"))
    while True:
        yield traffic.chat()


class _Traffic:
    """The users' traffic. Shared texts are drawn once; those drawn earlier are more popular."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._systems = [self._system() for _ in range(APPLICATIONS)]
        self._documents = [self._document() for _ in range(DOCUMENTS)]
        # Conversations that may go on; each ends with an answer.
        self._conversations: list[tuple[ChatMessage, ...]] = []

    def chat(self) -> Chat:
        history, exchange = self._next()
        messages = (*history, ChatMessage("user", exchange.question))
        self._remember((*messages, ChatMessage("assistant", exchange.reply)))
        return Chat(messages, (len(exchange.reasoning) + len(exchange.reply)) // CHARACTERS_PER_TOKEN + 1)

    def _next(self) -> tuple[tuple[ChatMessage, ...], _Exchange]:
        """The messages before, and the next question with its answer."""
        point = self._random.random()
        if point < FOLLOW_UP_SHARE and self._conversations:
            return self._conversations.pop(self._random.randrange(len(self._conversations))), self._problem()
        if point < FOLLOW_UP_SHARE + DOCUMENT_SHARE:
            return (), self._about(self._popular(self._documents))
        return (self._popular(self._systems),), self._problem()

    def _remember(self, conversation: tuple[ChatMessage, ...]) -> None:
        if sum(message.role == "user" for message in conversation) < MOST_TURNS:
            self._conversations.append(conversation)
        if len(self._conversations) > LIVE_CONVERSATIONS:
            self._conversations.pop(0)

    def _popular(self, items: Sequence[Item]) -> Item:
        """A random item by Zipf's law: the item of rank r is drawn in proportion to 1 / r."""
        return self._random.choices(items, [1 / rank for rank in range(1, len(items) + 1)])[0]

    def _problem(self) -> _Exchange:
        problem = draw(self._random.choice(list(SHORT_TASKS.values())), self._random, held_out=True)
        return _Exchange(problem.prompt, problem.reasoning, problem.reply)

    def _system(self) -> ChatMessage:
        examples = [self._problem() for _ in range(self._random.choice(EXAMPLES))]
        solved = (f"{each.question}\n{each.reply}" for each in examples)
        return ChatMessage("system", "\n\n".join([self._random.choice(INSTRUCTIONS), *solved]))

    def _document(self) -> str:
        """Prose that states a few facts."""
        characters = round(MEDIAN_DOCUMENT * self._random.lognormvariate(0, DOCUMENT_SIGMA))
        length = min(characters, LONGEST_DOCUMENT)
        return draw_long(LONG_TASKS["needle"], self._random, length, held_out=True).prompt.rpartition("\n\n")[0]

    def _about(self, document: str) -> _Exchange:
        owner, value = self._random.choice(FACT.findall(document))
        question = self._random.choice(ASK_NEEDLE).format(key=owner)
        return _Exchange(
            question=f"{document}\n\n{question}",
            reasoning=f"I look for {owner}.\nThe access code of {owner} is {value}.",
            reply=f"The access code of {owner} is **{value}**",
        )
