"""The mesh of deploy/compose.yaml, in containers."""

import http.client
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mesh.ports import free_port
from tests.support.timing import timed

# Only ends a hang: long enough for a machine that is busy with other work.
PATIENCE_SECONDS = 900.0


@dataclass(frozen=True)
class Container:
    image: str
    # When its process was last started.
    started: str
    # Docker's word: starting, healthy or unhealthy.
    health: str


class ComposeMesh:
    """One project of compose. The files of a version are in `deploy` under that version's root."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._http_port, self._grpc_port = free_port(), free_port()
        # Files and image of the version that was brought up last.
        self._root, self._image = Path(), ""

    def environment(self, image: str) -> dict[str, str]:
        ports = {"HTTP_PORT": str(self._http_port), "GRPC_PORT": str(self._grpc_port)}
        return {**os.environ, **ports, "DEEPMESH_IMAGE": image}

    def up(self, root: Path, image: str) -> None:
        """Bring this version up, replacing another one that runs, and wait until every container is healthy."""
        self._root, self._image = root, image
        with timed(f"compose up of {image}"):
            self.run("up", "--detach", "--no-build", "--wait")

    def down(self, root: Path) -> None:
        self._root = root
        self.run("down", "--volumes", "--remove-orphans")

    def run(self, *arguments: str) -> str:
        command = ["docker", "compose", "-f", str(self._root / "deploy/compose.yaml"), "-p", self._project, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment(self._image))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def container(self, service: str) -> Container:
        name = f"{self._project}-{service}-1"
        done = subprocess.run(["docker", "inspect", name], capture_output=True, text=True)
        (found,) = json.loads(done.stdout) or [{"Config": {"Image": ""}, "State": {"StartedAt": "", "Health": {}}}]
        return Container(
            found["Config"]["Image"], found["State"]["StartedAt"], found["State"]["Health"].get("Status", "")
        )

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < end, "it did not happen in time: " + self.run("ps", "--all")
            time.sleep(0.2)

    def answer(self, question: str, max_tokens: int = 256) -> str:
        """The answer's text. A request that no server has taken yet is sent again; an answer that has begun must
        end.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                with urllib.request.urlopen(self._request(question, max_tokens), timeout=PATIENCE_SECONDS) as response:
                    return "".join(_pieces(response))
            except urllib.error.HTTPError as error:
                assert error.code in (429, 503), error.read().decode()
                pause = float(error.headers["Retry-After"])
            except (urllib.error.URLError, http.client.RemoteDisconnected, ConnectionError):
                pause = 0.5
            assert time.monotonic() < end, "nobody answers"
            time.sleep(pause)

    def _request(self, question: str, max_tokens: int) -> urllib.request.Request:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0}
        return urllib.request.Request(
            f"http://127.0.0.1:{self._http_port}/v1/chat/completions",
            json.dumps({**body, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The pieces of a streamed answer, with its reasoning. Raises AssertionError if the stream breaks off."""
    begun = ended = False
    for line in response:
        field, _, data = line.decode().strip().partition(": ")
        if field == "data" and data == "[DONE]":
            ended = True
        elif field == "data":
            event = json.loads(data)
            assert "error" not in event, event
            begun = True
            delta = event["choices"][0]["delta"]
            yield delta.get("reasoning_content") or delta.get("content") or ""
    assert begun and ended, "the answer was cut off"


def build_image(root: Path, tag: str) -> None:
    """Build the image of the version whose files are in `root`."""
    command = ["docker", "buildx", "build", "--network", "host", "-f", "deploy/Dockerfile", "-t", tag]
    for argument, variable in (("BASE", "BASE_IMAGE"), ("TORCH", "TORCH")):
        value = os.environ.get(variable)
        command += ["--build-arg", f"{argument}={value}"] if value else []
    for secret, variable in (("ca", "CA_FILE"), ("pip", "PIP_CONF")):
        path = os.environ.get(variable)
        command += ["--secret", f"id={secret},src={path}"] if path else []
    with timed(f"build of {tag}"):
        subprocess.run([*command, "."], cwd=root, check=True)
