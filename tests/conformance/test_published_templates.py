"""Published chat templates, rendered as transformers does: `DEEPMESH_CHAT_TEMPLATES=DIR make check-templates`.

DIR holds templates as *.jinja, such as llama.cpp's models/templates or the chat_template.jinja of checkpoints. Each
gets random chats with tools, calls and reasoning; prompts must be equal, or both must refuse the chat.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompts.chat import TemplateOptions
from gateway.prompts.jinja_template import TEMPLATE_FAULTS as FAULTS
from gateway.prompts.template_skills import TemplateSkills
from mesh.errors import InvalidRequest
from tests.gateway.prompts.test_turns import as_given, sent, sent_tools, template
from tests.support.chat_templates import TOOL, Habit, chats
from tests.support.rendered import our_text, their_text

pytestmark = pytest.mark.check("templates")
DIRECTORY = Path(os.environ.get("DEEPMESH_CHAT_TEMPLATES", "chat-templates"))
# Templates that look at the characters that we disguise.
DIFFERENT = {
    "Kimi-K3": "sorts keys",
    "meetkai-functionary-medium-v3.1": "escapes HTML",
    "openbmb-MiniCPM5-1B": "quotes values that hold <",
}


def known(path: Path) -> Any:
    why = DIFFERENT.get(path.stem)
    marks = [] if why is None else [pytest.mark.xfail(reason=why, strict=False)]
    return pytest.param(path, marks=marks, id=path.stem)


PATHS = sorted(DIRECTORY.glob("*.jinja"))


def test_there_are_templates() -> None:
    assert PATHS, f"{DIRECTORY} holds no *.jinja: name a directory in DEEPMESH_CHAT_TEMPLATES"


@pytest.mark.parametrize("path", [known(path) for path in PATHS])
def test_prompts_are_those_of_transformers(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    chat_template, style = template(source), style_of(source)

    @settings(max_examples=40)
    @given(chat=chats(), tools=st.lists(TOOL, max_size=2), thinking=st.sampled_from([None, True, False]))
    def same(chat: list[dict[str, Any]], tools: list[dict[str, Any]], thinking: bool | None) -> None:
        if style is None:
            chat = [message for message in chat if message["role"] == "user"]
        offered = tools if "tools" in source else []
        habit = style or Habit(source)
        variables = {} if thinking is None else {"thinking": thinking, "enable_thinking": thinking}
        options = TemplateOptions(thinking)
        ours = answered(lambda: our_text(chat_template.render(sent(chat), options, sent_tools(offered))))
        theirs = answered(lambda: their_text(source, list(as_given(chat, habit)), offered or None, **variables))
        assert ours == theirs

    same()


def style_of(source: str) -> Habit | None:
    """The form in which transformers renders all of a turn with calls; None if there is none."""

    def run(variables: Mapping[str, Any]) -> str:
        try:
            return their_text(source, variables["messages"], variables["tools"])
        except FAULTS as error:
            raise InvalidRequest(str(error)) from error

    calls = TemplateSkills.of(source, {"tools"} if "tools" in source else set(), run).calls
    return None if calls is None else Habit(source, calls.no_text, calls.decoded, calls.apart)


def answered(render: Callable[[], str]) -> str | None:
    """The prompt; None if the template refuses the chat."""
    try:
        return render()
    except (*FAULTS, InvalidRequest):
        return None
