"""A mesh of processes with the shipped model, for suites that bring their own tests and loops."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from launcher.shipped_model import shipped_model
from tests.support.process_mesh import process_mesh

START_SECONDS = 300


@pytest.fixture(scope="session")
def mesh_url() -> Iterator[str]:
    """http://host:port of a mesh that runs on a thread of its own."""
    url: Future[str] = Future()
    stop = threading.Event()

    async def serve() -> None:
        try:
            async with process_mesh(shipped_model()) as mesh:
                url.set_result(mesh.http_url)
                await asyncio.to_thread(stop.wait)
        except BaseException as error:
            if not url.done():
                url.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield url.result(START_SECONDS)
    finally:
        stop.set()
        thread.join()
