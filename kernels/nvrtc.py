"""CUDA C++ compiled at run time. NVRTC and the driver come with a CUDA build of torch; nvcc is not needed."""

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

Dimensions = tuple[int, int, int]
_OnePointer = ctypes.c_void_p * 1


class CudaKernel:
    """An `extern "C" __global__` function whose only parameter is a struct."""

    def __init__(self, function: driver.CUfunction, shared_bytes: int, device: int) -> None:
        self._function = function
        self._shared_bytes = shared_bytes
        self._device = device

    def launch(
        self,
        grid: Dimensions,
        threads: int,
        arguments: ctypes.Structure,
        *,
        cluster: int = 1,
        dependent: bool = False,
        shared_bytes: int | None = None,
    ) -> None:
        """Launch on torch's current stream.

        cluster: blocks along the grid's first dimension that can reach each other's shared memory. dependent: the
        kernel may start before the previous one has ended, and waits for it by itself: see `kernels.dependent_launch`.
        shared_bytes: of a block, if it needs less than the source says.
        """
        # Torch's public way makes an object for the stream, which takes several times as long. Triton asks so too.
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        shared_bytes = self._shared_bytes if shared_bytes is None else shared_bytes
        config = _configuration(grid, threads, shared_bytes, cluster, dependent, stream)
        pointers = _OnePointer(ctypes.addressof(arguments))
        _check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))


# Large enough for the launches of some hundred sizes of steps: steps of the same size have the same ones.
@lru_cache(maxsize=4096)
def _configuration(
    grid: Dimensions, threads: int, shared_bytes: int, cluster: int, dependent: bool, stream: int
) -> driver.CUlaunchConfig:
    """Shared, so it must not be changed; the driver reads it during the launch only."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    config.attrs = [*_cluster_attribute(cluster), *_dependent_attribute(dependent)]
    config.numAttrs = len(config.attrs)
    return config


def _cluster_attribute(blocks: int) -> list[driver.CUlaunchAttribute]:
    if blocks == 1:
        return []
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = blocks, 1, 1
    return [attribute]


def _dependent_attribute(dependent: bool) -> list[driver.CUlaunchAttribute]:
    if not dependent:
        return []
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return [attribute]


@cache
def load_kernel(source: Path, name: str, device: int, macros: tuple[str, ...] = ()) -> CudaKernel:
    """Compile for the device's own architecture, with these macros defined.

    A kernel NAME with dynamic shared memory says how much a block needs: its source has an int NAME_shared_bytes.
    """
    with torch.cuda.device(device):
        # The driver's calls need the context that torch makes.
        torch.cuda.current_stream().synchronize()
        module = _module(source, device, macros)
        function = _check(driver.cuModuleGetFunction(module, name.encode()))
        shared_bytes = _shared_bytes(module, name)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return CudaKernel(function, shared_bytes, device)


def _shared_bytes(module: driver.CUmodule, name: str) -> int:
    status, address, _ = driver.cuModuleGetGlobal(module, f"{name}_shared_bytes".encode())
    if status == driver.CUresult.CUDA_ERROR_NOT_FOUND:
        return 0
    _check([status])
    found = ctypes.c_int()
    _check(driver.cuMemcpyDtoH(ctypes.addressof(found), address, ctypes.sizeof(found)))
    return found.value


@cache
def _module(source: Path, device: int, macros: tuple[str, ...]) -> driver.CUmodule:
    return _check(driver.cuModuleLoadData(_compiling(source, _target(device), macros).result().code))


def compile_ahead(sources: Iterable[Path], device: int, macros: tuple[str, ...] = ()) -> None:
    """Begin to compile what `load_kernel` will ask for with these macros, all sources at once. An error is that of the
    load.
    """
    for source in sources:
        _compiling(source, _target(device), macros)


@cache
def _compiling(source: Path, target: str, macros: tuple[str, ...]) -> "Future[Compiled]":
    """Begun when first asked for, in a thread: NVRTC lets others run meanwhile, and the process end."""
    compiled: Future[Compiled] = Future()

    def run() -> None:
        try:
            compiled.set_result(compile_source(source, target, macros))
        except Exception as error:  # noqa: BLE001
            compiled.set_exception(error)

    Thread(target=run, name=f"nvrtc {source.stem}", daemon=True).start()
    return compiled


def _target(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    # Warpgroup products exist only in the architecture-specific target.
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


@dataclass(frozen=True, slots=True)
class Compiled:
    # Machine code.
    code: bytes
    # The compiler's remarks, for example that it serializes warpgroup products.
    log: str


def compile_source(source: Path, target: str, macros: tuple[str, ...] = (), options: Sequence[str] = ()) -> Compiled:
    """Compile for `target`, for example sm_90a, with these macros defined. Needs no device.

    Includes are relative to the source. options: further ones of NVRTC.
    """
    program = _check(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    given = [f"--gpu-architecture={target}", "--std=c++17", f"-I{source.parent}"]
    all_options = [each.encode() for each in (*given, *(f"--define-macro={macro}" for macro in macros), *options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(all_options), all_options)
    # NVRTC writes into what it is given. A bytes object of one byte is shared by the whole interpreter.
    log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
    _check(nvrtc.nvrtcGetProgramLog(program, log))
    remarks = log.decode().strip("\0 \n")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"{source.name} does not compile for {target}: {remarks}")
    code = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    return Compiled(bytes(code), remarks)


# Large enough for all weights and activations of a step; the next step has them at the same addresses.
# Given by position, since the cache takes twice as long to find what keywords name.
@lru_cache(maxsize=16384)
def encode_rows(
    address: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int
) -> ctypes.Array[ctypes.c_uint64]:
    """A tensor map of contiguous rows, for the copy engine: a box is `box_bytes` (64 or 128) of `box_rows` rows.

    In shared memory a box's rows are swizzled over their own length, as matrix instructions expect.
    """
    return _encode(address, (row_bytes, rows), (row_bytes,), (box_bytes, box_rows))


@lru_cache(maxsize=4096)
def encode_halves(address: int, matrices: int, rows: int, row_bytes: int) -> ctypes.Array[ctypes.c_uint64]:
    """A tensor map of matrices whose rows are two halves of `rows`, a multiple of 8: a box is 128 bytes of 128 rows.

    These are, eight times, eight rows of the first half and the same ones of the second half. The dimensions are bytes,
    rows of eight, halves, eights and matrices.
    """
    sizes = row_bytes, 8, 2, rows // 8, matrices
    return _encode(
        address, sizes, (row_bytes, rows * row_bytes, 8 * row_bytes, 2 * rows * row_bytes), (128, 8, 2, 8, 1)
    )


def _encode(
    address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> ctypes.Array[ctypes.c_uint64]:
    """sizes, box: of each dimension, the first one in bytes; strides: of the others, in bytes."""
    swizzles = driver.CUtensorMapSwizzle
    encoded = _check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1) for _ in box],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            {64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B, 128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B}[box[0]],
            # The length of most boxes' rows. With 256 bytes FP8 weights of 117 MB took 30.1 us instead of 29.3.
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return (ctypes.c_uint64 * 16)(*(int(word) for word in encoded.opaque))


def _check(result: Sequence[Any]) -> Any:
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA answers {status.name}")
    return values[0] if values else None
