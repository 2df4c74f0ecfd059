"""Resident memory of a mesh's processes over thousands of requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.meshes.oracle_mesh import OracleMesh, oracle_mesh
from bench.meshes.processes import family
from loadgen import run as load
from loadgen.options import LoadOptions
from mesh.errors import EndpointUnavailable

CONCURRENCY = 64
PROMPT_TOKENS, ANSWER_TOKENS = 96, 16
# All that is kept on purpose fills up during the warm-up: the engine's blocks (two a request) and the decision log.
SETTINGS = ("decode.engine.total_blocks=1024", "decode.engine.max_requests=64", "scheduler.decisions=500")


@dataclass
class MemoryCurve:
    """Resident bytes by process, after each number of requests."""

    requests: list[int] = field(default_factory=list)
    resident_bytes: dict[str, list[int]] = field(default_factory=dict)

    def note(self, requests: int, resident: Mapping[str, int]) -> None:
        self.requests.append(requests)
        for name, size in resident.items():
            self.resident_bytes.setdefault(name, []).append(size)

    def growth_bytes(self, name: str, warmup: int) -> int:
        """Growth from the end of the warm-up to the last request."""
        return self.resident_bytes[name][-1] - self.resident_bytes[name][self.requests.index(warmup)]


async def serving_memory(log: Path, requests: int, warmup: int, lot: int) -> MemoryCurve:
    """Send `warmup` and then `requests` requests through a mesh, in lots over gRPC and over HTTP in turn.

    Prompts never repeat. Raises EndpointUnavailable if a request fails.
    """
    assert requests % lot == warmup % lot == 0
    curve = MemoryCurve()
    async with oracle_mesh(log, SETTINGS) as mesh:
        curve.note(0, resident(mesh.process_ids))
        for done in range(lot, warmup + requests + 1, lot):
            await _send_lot(mesh, lot, seed=done, over_http=done // lot % 2 == 0)
            curve.note(done, resident(mesh.process_ids))
    return curve


def resident(process_ids: Mapping[str, int]) -> dict[str, int]:
    """Resident bytes of each process, and of each process it started, such as a decode worker's rank."""
    sizes = {}
    for name, process_id in process_ids.items():
        own, *started = family(process_id)
        sizes[name] = own.memory_info().rss
        sizes |= {f"{name} rank {index}": process.memory_info().rss for index, process in enumerate(started)}
    return sizes


async def _send_lot(mesh: OracleMesh, requests: int, seed: int, over_http: bool) -> None:
    options = LoadOptions(
        url=mesh.url if over_http else None,
        grpc=None if over_http else mesh.gateway,
        rate=float("inf"),
        requests=requests,
        max_concurrency=CONCURRENCY,
        warmup=0,
        isl=PROMPT_TOKENS,
        osl=ANSWER_TOKENS,
        seed=seed,
    )
    summary = (await load.load(options)).summary
    if summary.errors:
        raise EndpointUnavailable(f"requests failed while memory was measured: {summary.errors}")
