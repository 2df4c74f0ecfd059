"""`deepmesh chat`: a conversation in the terminal."""

import asyncio
import sys
from contextlib import suppress
from typing import Annotated

import typer
from deepmesh.v1 import common_pb2, gateway_pb2
from rich.console import Console

from cli.conversation import Conversation
from cli.endpoints import GATEWAY, ApiKeyOption, GatewayOption
from cli.terminal import make_console
from mesh.errors import InvalidRequest, MeshError
from mesh.rpc.channel import Channels

# The largest number that the request's field holds.
MOST_TOKENS = 2**32 - 1
COMMANDS = """/clear  forget the conversation so far
/help   show this
Ctrl-C stops an answer, and takes its question back; Ctrl-D ends the chat."""


def chat(
    endpoint: GatewayOption = GATEWAY,
    model: Annotated[str, typer.Option(help="Needed only if the mesh serves several.")] = "",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[
        int, typer.Option(min=0, max=MOST_TOKENS, help="Of one answer; 0 is what the context leaves.")
    ] = 1024,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.6,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Share of the probability that is drawn from.")] = 0.95,
    api_key: ApiKeyOption = None,
) -> None:
    """Talk to a mesh. Ctrl-C stops an answer, Ctrl-D ends, /help lists commands; piped input is one message.

    Reasoning is dimmed. If an answer is stopped, its question and the partial answer are dropped from the conversation.
    """
    sampling = common_pb2.SamplingParams(temperature=temperature, top_p=top_p)
    settings = gateway_pb2.GenerateRequest(model=model, max_tokens=max_tokens, sampling=sampling)
    messages = [{"role": "system", "content": system}] if system else []
    console = make_console()
    conversation = Conversation(endpoint, api_key, settings, messages, console, Channels())
    with asyncio.Runner() as runner:
        try:
            runner.run(conversation.connect())
            if sys.stdin.isatty():
                _converse(conversation, runner, console)
            else:
                _answer_once(conversation, runner)
        finally:
            runner.run(conversation.close())


def _answer_once(conversation: Conversation, runner: asyncio.Runner) -> None:
    text = sys.stdin.read().strip()
    if not text:
        raise InvalidRequest("the message is empty: pipe some text, or run deepmesh chat in a terminal")
    runner.run(conversation.ask(text))


def _converse(conversation: Conversation, runner: asyncio.Runner, console: Console) -> None:
    with suppress(ImportError):
        # Enables line editing in input().
        import readline  # noqa: F401
    while True:
        try:
            text = input("› ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not text:
            continue
        if text.startswith("/"):
            _command(text, conversation, console)
            continue
        try:
            # The runner turns Ctrl-C into a cancellation of the answer.
            runner.run(conversation.ask(text))
        except KeyboardInterrupt:
            continue
        except MeshError as error:
            console.print(error.message, style="red", markup=False)


def _command(text: str, conversation: Conversation, console: Console) -> None:
    if text == "/clear":
        conversation.clear()
        console.print("the conversation is empty", style="dim")
    elif text == "/help":
        console.print(COMMANDS, markup=False)
    else:
        console.print(f"{text.split()[0]} is no command: /help lists them", style="red", markup=False)
