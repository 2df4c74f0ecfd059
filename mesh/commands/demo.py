"""`deepmesh demo`: a mesh of processes, three chats, a table, and everything stopped again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from rich.console import Console
from rich.table import Table

from mesh.channel import open_channel
from mesh.commands.answers import Answer, Show, chat_prompt, stream_grpc, stream_http
from mesh.commands.make_checkpoint import make_checkpoint
from mesh.commands.serving import until_served
from mesh.commands.terminal import make_console, show_on
from mesh.composition import DEFAULT_MODEL, HOST, MeshPlan, compose
from mesh.log_lines import LinePrinter
from mesh.ports import free_port
from mesh.preflight import check_plan
from mesh.signals import until_signal
from mesh.supervisor import Supervisor

Messages = list[dict[str, str]]

# Of a few blocks, so that the second turn finds them in the cache.
FIRST_QUESTION = """Here is a table.
gray-melon: 48215
solid-mill: 83502
grand-lake: XHJZT
deep-cup: 66408
frozen-seed: TFOPN
strong-shell: 82590
quiet-stone: CRSJA
high-hill: 95244
rusty-store: 67535

What is the value of strong-shell?"""
SECOND_QUESTION = "What is 82590 + 1946?"


def demo(
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="A checkpoint; a random one is made if it is not there.",
            show_default="the shipped tiny-r1",
        ),
    ] = DEFAULT_MODEL,
    decode: Annotated[int, typer.Option(min=1, max=8, help="Decode workers.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of each answer, at the most.")] = 256,
    log: Annotated[Path, typer.Option(help="Where the services' own lines go.")] = Path("out/demo.log"),
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="SERVICE.KEY=VALUE")] = None,
) -> None:
    """Start a mesh on free ports, chat over gRPC, over OpenAI HTTP, and a second turn that shares its prefix."""
    console = make_console()
    if not (model / "config.json").exists():
        console.print(f"making a random checkpoint in {model}")
        make_checkpoint(model)
    plan = MeshPlan(model, decode, free_port(), free_port(), free_port(), tuple(settings or ()))
    check_plan(plan)
    asyncio.run(_until_signal_or_done(plan, max_tokens, log, console))


async def _until_signal_or_done(plan: MeshPlan, max_tokens: int, log: Path, console: Console) -> None:
    stopping = asyncio.create_task(until_signal())
    chatting = asyncio.create_task(_demonstrate(plan, max_tokens, log, console))
    await asyncio.wait({stopping, chatting}, return_when=asyncio.FIRST_COMPLETED)
    if not chatting.done():
        chatting.cancel()
        await asyncio.gather(chatting, return_exceptions=True)
        raise typer.Exit(130)
    stopping.cancel()
    chatting.result()


async def _demonstrate(plan: MeshPlan, max_tokens: int, log: Path, console: Console) -> None:
    async with _mesh(plan, log, console):
        answers = await _chats(plan, max_tokens, console)
    console.print("\neverything stopped\n")
    console.print(answers_table(answers))


@asynccontextmanager
async def _mesh(plan: MeshPlan, log: Path, console: Console) -> AsyncIterator[None]:
    specs = compose(plan)
    console.print(f"starting {', '.join(spec.name for spec in specs)} (their lines: {log})")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        supervisor = Supervisor(specs, LinePrinter(max(len(spec.name) for spec in specs), output))
        try:
            await supervisor.start()
            processes = ", ".join(f"{name} {process_id}" for name, process_id in supervisor.process_ids.items())
            console.print(f"ready, as processes {processes}")
            yield
        finally:
            await supervisor.stop()


async def _chats(plan: MeshPlan, max_tokens: int, console: Console) -> list[tuple[str, Answer]]:
    messages = [{"role": "user", "content": FIRST_QUESTION}]
    models = await until_served(f"{HOST}:{plan.grpc_port}", plan.decode_workers)
    first, second, third = Answer(), Answer(), Answer()
    async with open_channel(f"{HOST}:{plan.grpc_port}") as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        show = _heading(console, "gRPC", FIRST_QUESTION)
        await stream_grpc(stub, _request(messages, max_tokens), first, show)
        show = _heading(console, "OpenAI HTTP", "the same question")
        body = {"model": models[0].name, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        await stream_http(f"http://{HOST}:{plan.http_port}/v1", body, second, show)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": SECOND_QUESTION}]
        show = _heading(console, "gRPC, second turn", SECOND_QUESTION)
        await stream_grpc(stub, _request(messages, max_tokens), third, show)
    return [("gRPC", first), ("OpenAI HTTP", second), ("second turn", third)]


def _request(messages: Messages, max_tokens: int) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=chat_prompt(messages), max_tokens=max_tokens, sampling=common_pb2.SamplingParams(temperature=0)
    )


def _heading(console: Console, title: str, question: str) -> Show:
    console.print(f"\n[bold]{title}[/bold]  {question}")
    return show_on(console)


def answers_table(answers: Sequence[tuple[str, Answer]]) -> Table:
    """Timings and token counts, one row an answer."""
    table = Table()
    table.add_column("request")
    for heading in ("TTFT ms", "TPOT ms", "prompt tokens", "cached", "answer tokens"):
        table.add_column(heading, justify="right")
    for name, answer in answers:
        times = (f"{value:.1f}" if value is not None else "-" for value in (answer.ttft_ms, answer.tpot_ms))
        counts = (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
        table.add_row(name, *times, *map(str, counts))
    return table
