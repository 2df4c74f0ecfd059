"""Copies segments of KV between a pool and a staging buffer, and hashes what is staged."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.kv_copy import triton, xxh3
from kernels.kv_copy.words import as_words

Table = npt.NDArray[np.int64]


class SegmentBuffer:
    """A staging buffer with the launches that fill and empty it, one at a time, on the current stream.

    Kernels read their job from memory, so that each direction is captured in one graph for all segments: a replay takes
    a tenth of the host's time.
    """

    def __init__(self, planes: Sequence[torch.Tensor], staging: torch.Tensor) -> None:
        """planes: the one or two pools of which a block consists, [layers, blocks, ...] contiguous, a block's bytes in
        one layer of each a multiple of 256; staging: [bytes] uint8, 16-byte aligned. On a GPU, make it on the stream
        that uses it.
        """
        assert len(planes) in (1, 2) and staging.dtype == torch.uint8
        assert all(pool.is_contiguous() and pool.shape[:2] == planes[0].shape[:2] for pool in planes)
        pool = planes[0]
        self._planes = as_words(planes)
        assert all(8 * words.shape[2] % triton.ROW_BYTES == 0 for words in self._planes)
        self._piece_bytes = 8 * sum(words.shape[2] for words in self._planes)
        most_pieces = len(staging) // self._piece_bytes
        self._staged = staging[: most_pieces * self._piece_bytes].view(torch.int64)
        chunks = -(-8 * len(self._staged) // xxh3.CHUNK_BYTES)
        self._job_blocks = triton.JOB_HASHES + chunks
        self._pinned = torch.zeros(self._job_blocks + most_pieces, dtype=torch.int64, pin_memory=pool.is_cuda)
        self._job: Table = self._pinned.numpy()
        self._device_job = torch.zeros_like(self._pinned, device=pool.device)
        self._sums = torch.empty(chunks * triton.SUMS_OF_CHUNK, dtype=torch.int64, device=pool.device)
        self._gather = _captured(self._launch_gather, pool.device)
        self._land = _captured(self._launch_land, pool.device)

    def gather(self, first_layer: int, layers: int, blocks: Sequence[int], table: Table) -> None:
        """Copy these blocks of some layers to the start of staging, layer by layer from `first_layer`, and hash them.

        table: from `xxh3.seeded_table`.
        """
        self._set_job(first_layer, layers, blocks, table)
        self._gather()

    def land(self, first_layer: int, layers: int, blocks: Sequence[int], table: Table, hashes: bytes) -> None:
        """Copy staging to these blocks, which are distinct, if it has these hashes. Other arguments as for `gather`."""
        self._set_job(first_layer, layers, blocks, table)
        self._job[triton.JOB_HASHES : triton.JOB_HASHES + len(hashes) // 8] = np.frombuffer(hashes, np.int64)
        self._land()

    def hashes(self) -> bytes:
        """XXH3's 64-bit hash of each 64 KiB that was gathered, and of the rest: 8 bytes each, little-endian.

        Valid once the stream has finished the gathering.
        """
        chunks = -(-int(self._job[triton.JOB_SIZE]) // xxh3.CHUNK_BYTES)
        return self._job[triton.JOB_HASHES : triton.JOB_HASHES + chunks].tobytes()

    def landed(self) -> bool:
        """Whether the hashes were right and the blocks were copied. Valid once the stream has finished the landing."""
        return not self._job[triton.JOB_WRONG]

    def _launch_gather(self) -> None:
        triton.launch_hashes(self._planes, self._staged, self._pinned, self._device_job, self._sums, gather=True)

    def _launch_land(self) -> None:
        triton.launch_hashes(self._planes, self._staged, self._pinned, self._device_job, self._sums, gather=False)
        triton.launch_scatter(self._planes, self._staged, self._device_job)

    def _set_job(self, first_layer: int, layers: int, blocks: Sequence[int], table: Table) -> None:
        job, count = self._job, len(blocks)
        job[triton.JOB_FIRST_LAYER] = first_layer
        job[triton.JOB_BLOCK_COUNT] = count
        job[triton.JOB_SIZE] = layers * count * self._piece_bytes
        job[triton.JOB_TABLE : triton.JOB_WRONG] = table
        job[triton.JOB_WRONG] = 0
        job[self._job_blocks : self._job_blocks + count] = blocks


def _captured(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return launch
    # Compiling inside a capture is not allowed, so launch once before.
    launch()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    launch()
    graph.capture_end()
    return graph.replay
