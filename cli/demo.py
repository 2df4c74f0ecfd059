"""`deepmesh demo`: starts a mesh of processes, chats with it, shows a table of the answers, and stops it again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Annotated

import typer
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from rich import box
from rich.console import Console
from rich.table import Table

from cli.answers import Answer, Show, chat_prompt, stream_grpc, stream_http
from cli.kv_moves import KvMoves, last_path, moves_between, settled, until_registered
from cli.settings.check import check_settings
from cli.status import bytes_by_transport
from cli.terminal import make_console, show_on
from launcher.composition import compose, device_list
from launcher.gpus import find_gpus
from launcher.hub import find_model
from launcher.logged_mesh import logged_mesh
from launcher.plan import HOST, WORKER_MODULES, MeshPlan
from launcher.preflight import check_plan
from launcher.serving import until_served
from launcher.shipped_model import shipped_model
from launcher.supervisor import Supervisor
from mesh.openai_client import OpenAIClient
from mesh.ports import free_port
from mesh.processes.signals import until_signal
from mesh.rpc.channel import Channels

Messages = list[dict[str, str]]

# Long enough for a few blocks, so that a prefill worker computes it, and its blocks are moved and found again.
FIRST_QUESTION = """Here is a table.
light-river: 20917
plain-tower: KQWBM
young-field: 71360
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
# Makes transfers show after each answer, rather than a second later.
QUICK_SETTINGS = ("scheduler.store_link.poll_seconds=0.1",)
SECOND_QUESTION = "What is 82590 + 1946?"


def demo(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|ID",
            help="A checkpoint's directory, or an id of the Hugging Face Hub.",
            show_default="the shipped tiny-r1",
        ),
    ] = None,
    decode: Annotated[int, typer.Option(min=1, max=8, help="Decode workers.")] = 1,
    prefill: Annotated[int, typer.Option(min=0, max=8, help="Prefill workers.")] = 1,
    kvstore: Annotated[int, typer.Option(min=0, max=4, help="KV stores.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of each answer.")] = 256,
    log: Annotated[Path, typer.Option(help="File for the services' own lines.")] = Path("out/demo.log"),
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SERVICE.KEY=VALUE", help="A setting of the mesh; repeatable.")
    ] = None,
) -> None:
    """Start a mesh on free ports and chat with it: over gRPC, over OpenAI HTTP, in a second turn, and after the
    workers' caches were emptied.
    """
    console = make_console()
    folder = shipped_model() if model is None else find_model(model)
    stores = tuple(free_port() for _ in range(kvstore))
    asked = (*QUICK_SETTINGS, *(settings or ()))
    ports = (free_port(), free_port(), free_port())
    plan = MeshPlan(folder, decode, *ports, asked, prefill, stores, find_gpus(), kv_secret=token_hex(32))
    check_settings(compose(plan))
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
    channels = Channels()
    async with _mesh(plan, log, console, channels) as supervisor:
        rows = await _Demonstration(plan, max_tokens, supervisor, console, channels).run()
    console.print("\neverything stopped\n")
    console.print(answers_table(rows))


@asynccontextmanager
async def _mesh(plan: MeshPlan, log: Path, console: Console, channels: Channels) -> AsyncIterator[Supervisor]:
    specs = compose(plan)
    console.print(f"starting {', '.join(spec.name for spec in specs)} (their lines: {log}); {device_list(specs)}")
    async with logged_mesh(specs, log, channels) as supervisor:
        processes = ", ".join(f"{name} {process_id}" for name, process_id in supervisor.process_ids.items())
        console.print(f"ready, as processes {processes}")
        yield supervisor


@dataclass(frozen=True)
class Row:
    """One answer, the workers that computed it, and the KV that moved for it."""

    name: str
    answer: Answer
    path: str
    moves: KvMoves


class _Demonstration:
    """Runs the chats one after another, so that the KV that moves meanwhile belongs to the answer."""

    def __init__(
        self, plan: MeshPlan, max_tokens: int, supervisor: Supervisor, console: Console, channels: Channels
    ) -> None:
        self._plan = plan
        self._max_tokens = max_tokens
        self._supervisor = supervisor
        self._channels = channels
        self._console = console
        self._scheduler = f"{HOST}:{plan.scheduler_port}"
        self._gateway = f"{HOST}:{plan.grpc_port}"

    async def run(self) -> list[Row]:
        (model,) = await self._until_ready()
        first = [{"role": "user", "content": FIRST_QUESTION}]
        rows = [
            await self._row("gRPC", FIRST_QUESTION, partial(self._ask_grpc, first)),
            await self._row("OpenAI HTTP", "the same question", partial(self._ask_http, model.name, first)),
        ]
        said = {"role": "assistant", "content": rows[0].answer.text}
        second = [*first, said, {"role": "user", "content": SECOND_QUESTION}]
        rows.append(await self._row("second turn", SECOND_QUESTION, partial(self._ask_grpc, second)))
        if self._plan.store_ports:
            await self._forget()
            again = "the second turn again"
            rows.append(await self._row("after a restart", again, partial(self._ask_grpc, second)))
        return rows

    async def _until_ready(self) -> list[gateway_pb2.Model]:
        await until_registered(self._scheduler, self._plan.workers, self._channels)
        return await until_served(self._gateway, self._plan.decode_workers, self._channels)

    async def _forget(self) -> None:
        """Restart every worker: their caches are then empty, the store's is not."""
        workers = [spec.name for spec in compose(self._plan) if spec.module in WORKER_MODULES]
        self._console.print(f"\nstarting {', '.join(workers)} again: their caches are empty now, the store's is not")
        await self._supervisor.restart(workers)
        await self._until_ready()

    async def _row(self, name: str, question: str, ask: Callable[[Answer, Show], Awaitable[None]]) -> Row:
        before = await settled(self._scheduler, self._channels)
        self._console.print(f"\n[bold]{name}[/bold]  {question}")
        answer = Answer()
        await ask(answer, show_on(self._console))
        moves = moves_between(before, await settled(self._scheduler, self._channels))
        return Row(name, answer, await last_path(self._scheduler, self._channels), moves)

    async def _ask_grpc(self, messages: Messages, answer: Answer, show: Show) -> None:
        request = gateway_pb2.GenerateRequest(
            prompt=chat_prompt(messages), max_tokens=self._max_tokens, sampling=common_pb2.SamplingParams(temperature=0)
        )
        async with self._channels.open(self._gateway) as channel:
            await stream_grpc(gateway_pb2_grpc.GatewayServiceStub(channel), request, answer, show)

    async def _ask_http(self, model: str, messages: Messages, answer: Answer, show: Show) -> None:
        body = {"model": model, "messages": messages, "max_tokens": self._max_tokens, "temperature": 0}
        async with OpenAIClient(f"http://{HOST}:{self._plan.http_port}/v1", None, timeout_s=None) as client:
            await stream_http(client, body, answer, show)


def answers_table(rows: Sequence[Row]) -> Table:
    """Timings, token counts, and the KV that moved to workers, one row per answer; fits into eighty columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("request\nand who computed it", no_wrap=True)
    measures = ("TTFT\nms", "TPOT\nms", "tokens\nin", "tokens\ncached", "tokens\nout")
    for heading in (*measures, "KV moved\nover UCX", "blocks\nfrom\nstore"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        answer = row.answer
        times = (f"{value:.1f}" if value is not None else "-" for value in (answer.ttft_ms, answer.tpot_ms))
        counts = (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
        moved = bytes_by_transport(row.moves.received_bytes)
        blocks = str(row.moves.fetched_blocks)
        table.add_row(f"[bold]{row.name}[/bold]\n{row.path}", *times, *map(str, counts), moved, blocks)
    return table
