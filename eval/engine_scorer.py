"""The likelihood of texts under a checkpoint, computed by the engine in a process of its own, without a mesh."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc

import mesh
from eval.perplexity import Document
from launcher.process import Child
from mesh.errors import ProcessFailed
from mesh.processes.exit_status import describe_status
from mesh.rpc.channel import Channels

# Loads the checkpoint and writes a list of log probabilities for each list of token ids.
MODULE = "engine.scoring"
STOP_GRACE_SECONDS = 5.0
TOKENIZE_SECONDS = 30.0


async def tokenize(gateway: str, documents: Sequence[Document], channels: Channels) -> list[list[int]]:
    """Each document's token ids, as the deepmesh gateway at `gateway` (host:port) makes them."""
    async with channels.open(gateway) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        token_ids = []
        for document in documents:
            request = gateway_pb2.CountTokensRequest(prompt=gateway_pb2.Prompt(text=document.text))
            token_ids.append(list((await stub.CountTokens(request, timeout=TOKENIZE_SECONDS)).token_ids))
        return token_ids


async def token_logprobs(
    token_ids: Sequence[Sequence[int]], settings: Sequence[str], directory: Path
) -> list[list[float]]:
    """For each text the natural log of the probability of every token but its first.

    `settings` configure the engine ("engine.model_dir=..."). The two processes exchange files in `directory`. Raises
    ProcessFailed with the scorer's last lines.
    """
    texts, scores = directory / "texts.jsonl", directory / "scores.jsonl"
    texts.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in token_ids))
    await _run([*settings, f"texts={json.dumps(str(texts))}", f"scores={json.dumps(str(scores))}"])
    found = [msgspec.json.decode(line, type=list[float]) for line in scores.read_bytes().splitlines()]
    texts.unlink()
    scores.unlink()
    return found


async def _run(settings: Sequence[str]) -> None:
    command = [sys.executable, "-P", "-m", MODULE, *(part for each in settings for part in ("--set", each))]
    environment = {
        "PYTHONPATH": str(Path(mesh.__file__).parents[1]),
        # As in a worker's rank: on a busy machine threads that spin would keep each other off their cores.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }
    child = Child("scorer", command, lambda name, line: None, environment)
    await child.start()
    try:
        status = await child.wait()
    finally:
        await asyncio.shield(child.stop(STOP_GRACE_SECONDS))
    if status != 0:
        raise ProcessFailed(f"scoring held-out text ended with {describe_status(status)}{child.last_words}")
