"""Which node of the host's memory is nearest to a GPU."""

from cuda.bindings import driver

from mesh.memory.memory_node import node_of_device

# "0000:1b:00.0" and a zero.
_ADDRESS_BYTES = 13


def node_of_gpu(index: int) -> int | None:
    """The node of this process's GPU of that number; None if it is not known, or there is but one."""
    status, gpu = driver.cuDeviceGet(index)
    if status != driver.CUresult.CUDA_SUCCESS:
        return None
    status, address = driver.cuDeviceGetPCIBusId(_ADDRESS_BYTES, gpu)
    if status != driver.CUresult.CUDA_SUCCESS:
        return None
    return node_of_device(address.decode("ascii").rstrip("\0"))
