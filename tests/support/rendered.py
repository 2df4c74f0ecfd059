"""The text of prompts: ours, and what transformers renders of the same chat."""

from typing import Any

from gateway.prompts.chat import RenderedChat
from tests.support.fake_decode import VOCABULARY
from tools.byte_tokenizer import build_tokenizer
from tools.tokenizer_files import BEGIN, END

LIBRARY = build_tokenizer(VOCABULARY)


def our_text(rendered: RenderedChat) -> str:
    return LIBRARY.decode(rendered.token_ids, skip_special_tokens=False)


def their_text(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **variables: Any
) -> str:
    """What transformers renders. Raises what the template does."""
    # Takes a second to import.
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [messages],
        list(tools) if tools is not None else None,
        chat_template=source,
        add_generation_prompt=True,
        bos_token=BEGIN,
        eos_token=END,
        **variables,
    )
    return str(rendered[0][0])
