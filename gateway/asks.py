"""What an API was asked for, in the client's terms."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import json, structs

from gateway.answer_forms import AnswerForm
from gateway.chat import DEFAULT_OPTIONS, TemplateOptions
from gateway.requests import OUR_NAMES, FieldNames
from gateway.tools import Toolbox
from gateway.turns import ChatMessage
from mesh.domain.sampling import DraftUse, Sampling


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    # Put the model's beginning-of-sequence token before the text, if it wants one.
    with_beginning: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[ChatMessage]
    options: TemplateOptions = DEFAULT_OPTIONS
    # What the model may call.
    toolbox: Toolbox | None = None

    @property
    def characters(self) -> int:
        """How much text there is for the template."""
        tools = self.toolbox.tools if self.toolbox is not None else ()
        size = sum(len(text) for message in self.messages for text in message.texts)
        return size + sum(len(tool.description) + len(json.encode(tool.parameters)) for tool in tools)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Ask:
    """A generation in a client's terms; None if the client left the choice to us."""

    request_id: str
    model: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    names: FieldNames = OUR_NAMES
    # The text ends with the stop string that ended it.
    include_stop_string: bool = False
    # Keep this many of the prompt's last tokens; -1 keeps as many as the context has room for.
    truncate_prompt_tokens: int | None = None
    # Share cached prefixes only with the tenant's requests that have the same one.
    cache_salt: str | None = None
    # The text begins with the prompt's.
    echo: bool = False
    # Among its tenant's requests the lowest goes first.
    priority: int = 0
    # Whether attention of a long prompt leaves out what hardly counts.
    sparse_prefill: bool | None = None
    # What the answer must be, behind its reasoning.
    form: AnswerForm | None = None
    # Texts that it must not hold.
    bad_words: tuple[str, ...] = ()
    # It ends of itself no earlier.
    min_tokens: int = 0
    # How the API that asks writes the answer, for the gateway that may go on with it; None if none may.
    written: bytes | None = None


def settled(sampling: Sampling, seed: int | None) -> Sampling:
    """With the seed, which is left to us if the client gave none. One that it gave is not to suffer by drafts."""
    drafts = sampling.drafts
    if seed is not None and drafts == DraftUse.UNSPECIFIED:
        drafts = DraftUse.STRICT
    return structs.replace(sampling, seed=settled_seed(seed), drafts=drafts)


def settled_seed(given: int | None) -> int:
    """The seed as an unsigned 64-bit key; a random one if the client gave none."""
    return secrets.randbits(64) if given is None else given % 2**64
