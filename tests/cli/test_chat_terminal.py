"""`deepmesh chat` on a terminal: a real pseudo-terminal, with its line discipline's Ctrl-C and Ctrl-D."""

import asyncio
import os
import pty
import sys

from tests.support.programs import ROOT
from tests.support.scripted_gateway import Delta, ScriptedGateway
from tests.support.waiting import eventually

CHAT = "import sys; from cli.main import main; sys.argv[0] = 'deepmesh'; main()"
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A process on a pseudo-terminal of its own, and what it has shown."""

    def __init__(self) -> None:
        self._output = b""
        self._ours, self._theirs = pty.openpty()

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        # In a session of its own, with the terminal as its controlling one and Ctrl-C not ignored, as a shell would
        # have it: who runs the tests in the background may ignore it.
        program = (
            "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
            f" signal.signal(signal.SIGINT, signal.default_int_handler); {CHAT}"
        )
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", program, *arguments],
            cwd=ROOT,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
        )
        os.close(self._theirs)
        asyncio.get_running_loop().add_reader(self._ours, self._read)
        return process

    @property
    def shown(self) -> str:
        # A character may arrive in pieces.
        return self._output.decode(errors="ignore")

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)

    def _read(self) -> None:
        try:
            self._output += os.read(self._ours, 65536)
        except OSError:
            # The other side is closed.
            asyncio.get_running_loop().remove_reader(self._ours)


async def test_a_chat_takes_ctrl_c_help_and_ctrl_d() -> None:
    hang = True

    async def before_end() -> None:
        await asyncio.sleep(60 if hang else 0)

    gateway = ScriptedGateway([Delta(text="an answer")], before_end)
    terminal = Terminal()
    async with gateway.served() as server:
        process = await terminal.start("chat", "--endpoint", server.endpoint)
        try:
            await eventually(lambda: "›" in terminal.shown)
            terminal.type(b"first\n")
            await eventually(lambda: "an answer" in terminal.shown)
            terminal.type(CTRL_C)
            await eventually(lambda: "[stopped]" in terminal.shown and terminal.shown.count("›") == 2)
            hang = False
            terminal.type(b"second\n")
            await eventually(lambda: terminal.shown.count("›") == 3)
            terminal.type(b"/help\n")
            await eventually(lambda: "/clear" in terminal.shown and terminal.shown.count("›") == 4)
            terminal.type(b"/cleer\n")
            await eventually(lambda: "/cleer is no command" in terminal.shown)
            terminal.type(CTRL_D)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            terminal.close()
    contents = [each.content for each in gateway.requests[1].prompt.chat.messages]
    assert contents == ["second"]
