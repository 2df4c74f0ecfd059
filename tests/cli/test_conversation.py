import asyncio
import io

import pytest
from deepmesh.v1 import gateway_pb2
from rich.console import Console

from cli.conversation import Conversation
from mesh.errors import EndpointUnavailable, MeshError, Overloaded
from mesh.rpc.channel import Channels
from tests.support.scripted_gateway import Delta, ScriptedGateway
from tests.support.waiting import eventually

WORDS = (Delta(reasoning_text="hmm "), Delta(text="Hello"), Delta(text=" there"))


def conversation(endpoint: str, output: io.StringIO, messages: list[dict[str, str]] | None = None) -> Conversation:
    console = Console(file=output, highlight=False, soft_wrap=True, emoji=False)
    return Conversation(endpoint, None, gateway_pb2.GenerateRequest(max_tokens=9), messages or [], console, Channels())


def said(request: gateway_pb2.GenerateRequest) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in request.prompt.chat.messages]


async def test_an_answer_is_printed_as_it_streams() -> None:
    gateway, output = ScriptedGateway(WORDS), io.StringIO()
    async with gateway.served() as server:
        talk = conversation(server.endpoint, output)
        await talk.connect()
        await talk.ask("Hi")
        await talk.close()
    assert output.getvalue() == "hmm \nHello there\n"
    assert gateway.requests[0].max_tokens == 9


async def test_reasoning_is_dimmed_on_a_terminal() -> None:
    gateway, output = ScriptedGateway(WORDS), io.StringIO()
    async with gateway.served() as server:
        console = Console(file=output, force_terminal=True, highlight=False, soft_wrap=True, emoji=False)
        talk = Conversation(server.endpoint, None, gateway_pb2.GenerateRequest(), [], console, Channels())
        await talk.connect()
        await talk.ask("Hi")
        await talk.close()
    assert "\x1b[2mhmm \x1b[0m" in output.getvalue()
    assert "\x1b" not in output.getvalue().partition("Hello")[2]


async def test_the_next_turn_carries_the_conversation_without_its_reasoning() -> None:
    gateway = ScriptedGateway(WORDS)
    async with gateway.served() as server:
        talk = conversation(server.endpoint, io.StringIO(), [{"role": "system", "content": "Be brief."}])
        await talk.connect()
        await talk.ask("Hi")
        await talk.ask("And?")
        await talk.close()
    assert said(gateway.requests[1]) == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello there"),
        ("user", "And?"),
    ]


async def test_an_answer_cannot_steer_the_terminal() -> None:
    text = "[red]not markup[/red] [/] :smile: \x1b[2J \x9b2J\x07\r"
    gateway, output = ScriptedGateway([Delta(text=text)]), io.StringIO()
    async with gateway.served() as server:
        talk = conversation(server.endpoint, output)
        await talk.connect()
        await talk.ask("Hi")
        await talk.close()
    assert output.getvalue() == "[red]not markup[/red] [/] :smile: ␛[2J �2J␇␍\n"


async def test_a_failed_turn_is_taken_back() -> None:
    failing = True

    async def fail_once() -> None:
        if failing:
            raise Overloaded("the mesh is full", retry_after_ms=10)

    gateway = ScriptedGateway(WORDS, fail_once)
    async with gateway.served() as server:
        talk = conversation(server.endpoint, io.StringIO())
        await talk.connect()
        with pytest.raises(Overloaded):
            await talk.ask("first")
        failing = False
        await talk.ask("second")
        await talk.close()
    assert said(gateway.requests[1]) == [("user", "second")]


async def test_a_stopped_question_leaves_the_conversation() -> None:
    ended, shown = asyncio.Event(), io.StringIO()
    stop = True

    async def hang() -> None:
        try:
            await asyncio.sleep(60 if stop else 0)
        finally:
            ended.set()

    gateway = ScriptedGateway(WORDS, hang)
    async with gateway.served() as server:
        talk = conversation(server.endpoint, shown)
        await talk.connect()
        turn = asyncio.create_task(talk.ask("Hi"))
        await eventually(lambda: "there" in shown.getvalue())
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await ended.wait()
        stop = False
        await talk.ask("go on")
        await talk.close()
    assert "[stopped]" in shown.getvalue()
    assert said(gateway.requests[1]) == [("user", "go on")]


async def test_a_cleared_conversation_keeps_its_system_message() -> None:
    gateway = ScriptedGateway(WORDS)
    async with gateway.served() as server:
        talk = conversation(server.endpoint, io.StringIO(), [{"role": "system", "content": "Be brief."}])
        await talk.connect()
        await talk.ask("Hi")
        talk.clear()
        await talk.ask("And?")
        await talk.close()
    assert said(gateway.requests[1]) == [("system", "Be brief."), ("user", "And?")]


async def test_a_terminal_shows_that_it_waits_for_the_first_token() -> None:
    output = io.StringIO()
    async with ScriptedGateway(WORDS).served() as server:
        console = Console(file=output, force_terminal=True, highlight=False, soft_wrap=True, emoji=False)
        talk = Conversation(server.endpoint, None, gateway_pb2.GenerateRequest(), [], console, Channels())
        await talk.connect()
        await talk.ask("Hi")
        await talk.close()
    assert "waiting for the first token" in output.getvalue().partition("hmm")[0]
    assert "waiting" not in output.getvalue().partition("hmm")[2]


async def test_no_gateway_is_one_clear_error() -> None:
    talk = conversation("127.0.0.1:1", io.StringIO())
    with pytest.raises(EndpointUnavailable, match=r"no gateway answers at 127\.0\.0\.1:1: is deepmesh up running\?"):
        await talk.connect()
    await talk.close()


async def test_an_error_of_the_gateway_is_shown_as_it_is() -> None:
    async def fail() -> None:
        raise Overloaded("the mesh is full")

    gateway = ScriptedGateway((), fail)
    async with gateway.served() as server:
        talk = conversation(server.endpoint, io.StringIO())
        await talk.connect()
        with pytest.raises(MeshError, match="the mesh is full"):
            await talk.ask("Hi")
        await talk.close()
