"""What the model learns of tools and of JSON."""

import json
from collections.abc import Sequence
from itertools import islice
from random import Random

from tokenizers import Tokenizer as VocabularyTokenizer

from eval.tasks.problem import belongs_to_test
from gateway.prompts.chat import ChatTemplate, TemplateOptions
from gateway.prompts.jinja_template import JinjaTemplate
from gateway.prompts.tokenizer import load_tokenizer
from gateway.prompts.turns import ChatMessage
from gateway.text.signs import NO_SIGNS
from gateway.tool_formats.deepseek import OUTPUT_BEGIN, OUTPUT_END, V31
from gateway.tools import Tool, Toolbox, ToolCall
from launcher.shipped_model import shipped_model
from models.train.json_talk import json_talk
from models.train.mixture import ExampleStream, Mixture
from models.train.packing import tokenize
from models.train.tool_talk import tool_talk
from tools.chat import ASSISTANT, CHAT_TEMPLATE, THINK, THINK_END, Turn, learned_conversation


def calls_in(reply: str) -> list[ToolCall]:
    reader = V31.reader(NO_SIGNS, True, lambda: "new", {})
    calls: dict[int, ToolCall] = {}
    for delta in [delta for parsed in (reader.push(reply), reader.finish()) for delta in parsed.calls]:
        known = calls.get(delta.index, ToolCall("", "", ""))
        calls[delta.index] = ToolCall("", known.name + (delta.name or ""), known.arguments + delta.arguments)
    return list(calls.values())


def messages_of(turns: Sequence[Turn]) -> list[ChatMessage]:
    """The turns as a client of the gateway has them. The last answer is left out."""
    messages: list[ChatMessage] = []
    for turn in turns:
        outputs = turn.prompt.split(OUTPUT_BEGIN)[1:]
        messages += [ChatMessage("tool", output.partition(OUTPUT_END)[0]) for output in outputs]
        messages += [] if outputs else [ChatMessage("user", turn.prompt)]
        calls = calls_in(turn.reply)
        messages.append(ChatMessage("assistant", "" if calls else turn.reply, calls))
    return messages[:-1]


def test_the_gateway_writes_tools_as_they_were_trained_on() -> None:
    tokenizer = load_tokenizer(shipped_model())
    template = ChatTemplate(JinjaTemplate(CHAT_TEMPLATE, tokenizer), tokenizer)
    vocabulary = VocabularyTokenizer.from_file(str(shipped_model() / "tokenizer.json"))
    random = Random(0)
    for _ in range(20):
        talk = tool_talk(random, held_out=False)
        tools = [Tool(**tool["function"], given=tool) for tool in talk.tools]
        thinking = talk.turns[-1].thinking is not None
        rendered = template.render(messages_of(talk.turns), TemplateOptions(thinking), Toolbox(tools))
        (document,) = tokenize(vocabulary, [learned_conversation(talk.turns, talk.system)])
        assert list(document.tokens)[: len(rendered.token_ids)] == rendered.token_ids
        assert all(document.learned[len(rendered.token_ids) :])


def test_written_calls_are_read_as_calls_of_offered_tools() -> None:
    random = Random(0)
    for _ in range(50):
        talk = tool_talk(random, held_out=False)
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in talk.tools}
        for call in [call for turn in talk.turns for call in calls_in(turn.reply)]:
            assert list(json.loads(call.arguments)) == list(offered[call.name]["properties"])


def test_no_call_is_in_both_splits() -> None:
    def drawn(*, held_out: bool) -> set[tuple[str, str]]:
        random = Random(1)
        talks = [tool_talk(random, held_out=held_out) for _ in range(60)]
        calls = [call for talk in talks for turn in talk.turns for call in calls_in(turn.reply)]
        return {(call.name, call.arguments) for call in calls if call.arguments != "{}"}

    held_out = drawn(held_out=True)
    assert held_out
    assert all(belongs_to_test("tool_call", " ".join(call)) for call in held_out)
    assert not any(belongs_to_test("tool_call", " ".join(call)) for call in drawn(held_out=False))


def test_json_answers_have_the_keys_that_were_asked_for() -> None:
    random = Random(2)
    for turn in [turn for _ in range(60) for turn in json_talk(random, held_out=False)]:
        assert all(key in turn.prompt for key in json.loads(turn.reply))


def test_quiet_answers_come_without_thinking_and_without_tools() -> None:
    quiet = Mixture(0.0, (100, 300), small_talk_share=0, library_share=0, conversation_share=0, quiet_share=1.0)
    for example in islice(ExampleStream(quiet, (), seed=3), 60):
        assert example.context.endswith(f"{ASSISTANT}{THINK_END}")
        assert THINK not in example.context + example.completion
        assert not calls_in(example.completion)
