"""Tools that a conversation offers, and calls of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from models.train.tool_kinds import Kind, draw_kind


@dataclass(frozen=True)
class Call:
    """One call, and how a user asks for it."""

    name: str
    # JSON.
    arguments: str
    request: str
    # What the tool answers.
    output: str

    @property
    def key(self) -> str:
        """Decides whether the call is held out."""
        return f"{self.name} {self.arguments}"


@dataclass(frozen=True)
class Offer:
    """A tool that a conversation offers."""

    kind: Kind
    name: str
    # In OpenAI's form.
    tool: Mapping[str, Any]

    def call(self, random: Random) -> Call:
        arguments = {key: draw(random) for key, (_, draw) in self.kind.parameters.items()}
        shown = {key: json.dumps(value) if isinstance(value, bool) else value for key, value in arguments.items()}
        request = random.choice(self.kind.requests).format(tool=self.name, **shown)
        return Call(self.name, json.dumps(arguments, ensure_ascii=False), request, self.kind.outputs(random))


def draw_offer(random: Random) -> Offer:
    kind = draw_kind(random)
    name = random.choice(kind.names)
    properties = {key: {"type": type_} for key, (type_, _) in kind.parameters.items()}
    parts = [("properties", properties), ("type", "object")]
    if properties:
        parts.insert(1, ("required", list(properties)))
    if random.random() < 0.5:
        parts.insert(0, parts.pop())
    function = {"name": name, "description": random.choice(kind.descriptions), "parameters": dict(parts)}
    return Offer(kind, name, {"type": "function", "function": function})
