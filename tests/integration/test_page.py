"""The operators' page in a real browser: `make check-page`, which needs Chromium (Debian's `chromium`) and Playwright.

It writes docs/page.png.
"""

import asyncio
import json
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from deepmesh.v1 import gateway_pb2
from playwright.async_api import Page, Route, async_playwright, expect

from launcher.shipped_model import shipped_model
from mesh.ports import free_port
from tests.support.mesh_requests import kill
from tests.support.process_mesh import ProcessMesh, process_mesh

pytestmark = [pytest.mark.check("page"), pytest.mark.slow]
BROWSER = os.environ.get("DEEPMESH_CHROMIUM") or shutil.which("chromium")
PICTURE = Path(__file__).parent.parent.parent / "docs" / "page.png"
MOST_MS = 60_000


@asynccontextmanager
async def shown() -> AsyncIterator[tuple[ProcessMesh, Page]]:
    """The page of a mesh of tiny-r1: a prefill worker, two decode workers, a store. Asserts that it has no error."""
    assert BROWSER, "install chromium, or set DEEPMESH_CHROMIUM"
    port = free_port()
    settings = (
        f"gateway.server.metrics_port={port}",
        "prefill.engine.total_blocks=64",
        "decode.engine.total_blocks=64",
    )
    errors: list[str] = []
    async with (
        process_mesh(shipped_model(), workers=2, prefill=1, stores=1, settings=settings) as mesh,
        async_playwright() as playwright,
    ):
        browser = await playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: errors.append(request.url) if str(port) not in request.url else None)
        await page.goto(f"http://127.0.0.1:{port}/")
        try:
            yield mesh, page
        finally:
            await browser.close()
    assert errors == []


@asynccontextmanager
async def busy(mesh: ProcessMesh) -> AsyncIterator[None]:
    """Have two clients send requests all the time."""
    tasks = [asyncio.create_task(_ask_on(mesh, random.Random(number))) for number in range(2)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask_on(mesh: ProcessMesh, source: random.Random) -> None:
    while True:
        ids = [source.randint(300, 1500) for _ in range(source.choice((100, 500, 900)))]
        prompt = gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=ids))
        request = gateway_pb2.GenerateRequest(prompt=prompt, max_tokens=20, ignore_eos=True)
        with suppress(grpc.aio.AioRpcError):
            async for _ in mesh.gateway.Generate(request, timeout=60):
                pass


async def test_the_page_shows_a_worker_killed_and_back() -> None:
    async with shown() as (mesh, page), busy(mesh):
        for name in ("prefill-0", "decode-0", "decode-1"):
            await expect(page.locator(f'.node[data-name="{name}"]')).to_contain_text("serving", timeout=MOST_MS)
        await expect(page.locator(".node.store")).to_contain_text("attached")
        await expect(page.locator("#wires path.moving").first).to_be_attached(timeout=MOST_MS)
        await expect(page.locator("#decisions li").first).to_contain_text("ms a token", timeout=MOST_MS)
        await expect(page.locator("#ttft b")).not_to_have_text("–", timeout=MOST_MS)
        await expect(page.locator("#tpot b")).not_to_have_text("–", timeout=MOST_MS)
        await page.fill("#tpot-objective", "100000")
        await page.fill("#ttft-objective", "100000")
        await expect(page.locator("#goodput b")).to_have_text("100", timeout=MOST_MS)
        await page.click("#send")
        await expect(page.locator(".reasoning")).to_contain_text("tens", timeout=MOST_MS)
        await page.screenshot(path=PICTURE, full_page=True)
        kill(mesh, "decode-1")
        killed = page.locator('.node[data-name="decode-1"]')
        await expect(killed).to_have_class("node decode lost", timeout=MOST_MS)
        await expect(killed).to_have_class("node decode", timeout=MOST_MS)


async def test_the_playground_streams_reasoning_and_can_be_stopped() -> None:
    async with shown() as (_, page):
        await expect(page.locator("#model")).to_have_value("tiny-r1", timeout=MOST_MS)
        await page.click("#send")
        await expect(page.locator(".reasoning")).to_contain_text("ones", timeout=MOST_MS)
        assert await page.locator("#usage").inner_text() == ""
        await expect(page.locator(".assistant .content")).to_contain_text("825", timeout=MOST_MS)
        await expect(page.locator("#usage")).to_contain_text("tokens in", timeout=MOST_MS)
        await page.fill("#question", "What is 111 + 222?")
        await page.click("#send")
        await expect(page.locator(".reasoning").nth(1)).not_to_be_empty(timeout=MOST_MS)
        await page.click("#stop")
        await expect(page.locator(".error")).to_contain_text("stopped")


async def test_the_playground_shows_calls_of_tools_as_they_come() -> None:
    async with shown() as (_, page):
        sent: list[str] = []

        async def answer(route: Route) -> None:
            sent.append(route.request.post_data or "")
            pieces = [{"id": "c1", "index": 0, "function": {"name": "get_weather", "arguments": ""}}]
            pieces += [{"index": 0, "function": {"arguments": part}} for part in ('{"city": ', '"Paris"}')]
            chunks = [{"choices": [{"delta": {"tool_calls": [piece]}}]} for piece in pieces]
            lines = [*map(json.dumps, chunks), "[DONE]"]
            body = "".join(f"data: {line}\n\n" for line in lines)
            await route.fulfill(content_type="text/event-stream", body=body)

        await page.route("**/v1/chat/completions", answer)
        await page.click("summary")
        await page.fill("#tools", '[{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]')
        await page.click("#send")
        await expect(page.locator(".call")).to_have_text('get_weather {"city": "Paris"}')
        assert json.loads(sent[0])["tools"][0]["function"]["name"] == "get_weather"
