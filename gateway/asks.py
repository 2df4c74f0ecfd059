"""What an API was asked for, in the client's terms."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import json, structs

from gateway.forms.answer_forms import AnswerForm
from gateway.prompts.chat import DEFAULT_OPTIONS, TemplateOptions
from gateway.prompts.turns import ChatMessage
from gateway.requests import OUR_NAMES, FieldNames
from gateway.tools import Toolbox
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
    # The tools that the model may call.
    toolbox: Toolbox | None = None

    @property
    def characters(self) -> int:
        """Characters of text that the template gets."""
        tools = self.toolbox.tools if self.toolbox is not None else ()
        return sum(message.characters for message in self.messages) + sum(len(json.encode(tool.form)) for tool in tools)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation, in the client's terms. A field is None if the client left the choice to us."""

    request_id: str
    model: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    names: FieldNames = OUR_NAMES
    # Whether the text includes the stop string that ended it.
    include_stop_string: bool = False
    # Keep this many of the prompt's last tokens; -1 keeps as many as the context has room for.
    truncate_prompt_tokens: int | None = None
    # Share cached prefixes only with the tenant's requests that have the same one.
    cache_salt: str | None = None
    # Whether the answer's text begins with the prompt's text.
    echo: bool = False
    # Requests of one tenant run in the order of this number, lowest first.
    priority: int = 0
    # Whether the attention of a long prompt may skip positions that hardly count; None leaves it to the workers'
    # setting.
    sparse_prefill: bool | None = None
    # The form that the answer must have, after its reasoning.
    form: AnswerForm | None = None
    # Texts that the answer must not contain.
    bad_words: tuple[str, ...] = ()
    # The model cannot end the answer before this many tokens.
    min_tokens: int = 0
    # How the API writes this answer, for the gateway that may resume it; None if the answer cannot be resumed.
    written: bytes | None = None


def settled(sampling: Sampling, seed: int | None) -> Sampling:
    """`sampling` with a seed; we draw one if the client gave none. A client that gave one gets only strict drafts
    unless it asks for others: drafts must not change what its seed gives.
    """
    drafts = sampling.drafts
    if seed is not None and drafts == DraftUse.UNSPECIFIED:
        drafts = DraftUse.STRICT
    return structs.replace(sampling, seed=settled_seed(seed), drafts=drafts)


def settled_seed(given: int | None) -> int:
    """The seed as an unsigned 64-bit key; a random one if the client gave none."""
    return secrets.randbits(64) if given is None else given % 2**64
