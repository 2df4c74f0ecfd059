"""Segments of KV between a pool and a staging buffer, with the hashes of what is staged."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.kv_copy import reference, triton, xxh3

Table = npt.NDArray[np.int64]


class SegmentBuffer:
    """A staging buffer, and the launches that fill, hash and empty it: one at a time, on the current stream.

    Kernels read from the device's memory what they are to do, so that each launch is captured once for all segments: a
    replay takes a tenth of the host's time.
    """

    def __init__(self, pool: torch.Tensor, staging: torch.Tensor) -> None:
        """pool: [layers, blocks, 64, width] contiguous, a block's bytes in one layer a multiple of 8; staging: [bytes]
        uint8, 16-byte aligned. On a GPU, to be made on the stream that it is used on.
        """
        assert pool.is_contiguous() and staging.dtype == torch.uint8
        self._piece_bytes = pool[0, 0].numel() * pool.itemsize
        assert self._piece_bytes % 8 == 0
        most_pieces = len(staging) // self._piece_bytes
        most_chunks = -(-len(staging) // xxh3.CHUNK_BYTES)
        self._job = _HostAndDevice(triton.JOB_BLOCKS + most_pieces, staging.device)
        # Behind the hashes, the rest that is hashed on the host.
        self._hashes = _HostAndDevice(most_chunks + triton.REST_WORDS, staging.device)
        sums = torch.empty(most_chunks * triton.SUMS_OF_CHUNK, dtype=torch.int64, device=staging.device)
        job, hashes = self._job.device, self._hashes.device
        self._job.host[: triton.JOB_BLOCKS] = 0
        self._job.to_device()

        def launch_hashes() -> None:
            triton.launch_hashes(staging, job, sums, hashes)

        def launch_gather() -> None:
            triton.launch_copy(pool, staging, job, most_pieces, gather=True)
            launch_hashes()

        self._launch_gather = _captured(launch_gather, staging.device)
        self._launch_hashes = _captured(launch_hashes, staging.device)
        self._launch_scatter = _captured(
            lambda: triton.launch_copy(pool, staging, job, most_pieces, gather=False), staging.device
        )

    def gather(self, first_layer: int, layers: int, blocks: Sequence[int], table: Table) -> None:
        """Copy these blocks of `layers` layers from `first_layer` on, layer-major, to the start of the staging buffer,
        and hash it so far. table: `xxh3.seeded_table`.
        """
        self._set_job(first_layer, layers, blocks)
        self._hash(layers * len(blocks) * self._piece_bytes, table, self._launch_gather)

    def hash(self, size_bytes: int, table: Table) -> None:
        """The first `size_bytes` of the staging buffer."""
        self._hash(size_bytes, table, self._launch_hashes)

    def scatter(self, first_layer: int, layers: int, blocks: Sequence[int]) -> None:
        """The way back: arguments as of `gather`; the blocks are distinct."""
        self._set_job(first_layer, layers, blocks)
        self._job.to_device()
        self._launch_scatter()

    def hashes(self, seed: int) -> bytes:
        """XXH3's 64-bit hash of each 64 KiB of what was hashed and of the rest, 8 bytes each, little-endian, in order.

        Only when the stream has come so far. seed: that of the table.
        """
        chunks, rest = divmod(int(self._job.host[triton.JOB_SIZE]), xxh3.CHUNK_BYTES)
        if rest >= xxh3.SHORTEST_LONG:
            chunks, rest = chunks + 1, 0
        found = self._hashes.host
        short = torch.from_numpy(found[-triton.REST_WORDS :]).view(torch.uint8)[:rest]
        return found[:chunks].tobytes() + reference.chunk_hashes(short, seed)

    def _set_job(self, first_layer: int, layers: int, blocks: Sequence[int]) -> None:
        job, count = self._job.host, len(blocks)
        job[triton.JOB_FIRST_LAYER] = first_layer
        job[triton.JOB_BLOCK_COUNT] = count
        job[triton.JOB_PIECES] = layers * count
        job[triton.JOB_BLOCKS : triton.JOB_BLOCKS + count] = blocks

    def _hash(self, size_bytes: int, table: Table, launch: Callable[[], None]) -> None:
        self._job.host[triton.JOB_SIZE] = size_bytes
        self._job.host[triton.JOB_TABLE : triton.JOB_BLOCKS] = table
        self._job.to_device()
        launch()
        self._hashes.to_host()


class _HostAndDevice:
    """int64 words in pinned memory, and on the device."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._host = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.host: Table = self._host.numpy()
        self.device = torch.zeros(words, dtype=torch.int64, device=device)

    def to_device(self) -> None:
        self.device.copy_(self._host, non_blocking=True)

    def to_host(self) -> None:
        self._host.copy_(self.device, non_blocking=True)


def _captured(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return launch
    # What is compiled must not be compiled in a capture.
    launch()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    launch()
    graph.capture_end()
    return graph.replay
