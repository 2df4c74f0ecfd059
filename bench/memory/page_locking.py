"""How fast this machine provides page-locked memory, from which a GPU copies by itself.

`engine.offload` allocates the memory of one layer at a time.

`python -m bench.memory.page_locking [--gb 4]`

Each row is measured twice, because memory that a virtual machine has never used may have to come from its host first.
Without a GPU nothing is locked.
"""

import argparse
import mmap
import time
from dataclasses import dataclass

import torch
from rich.console import Console

GB = 1e9


@dataclass(frozen=True)
class Rates:
    """Bytes a second of the first write to each page, and of locking; None if that was not measured."""

    touched: float | None
    locked: float | None


def measure(size_bytes: int, *, huge: bool, threads: int | None) -> Rates:
    """threads: how many threads write to the pages before they are locked; None leaves that to the driver."""
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    touched = None
    if threads is not None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        started = time.perf_counter()
        memory[:: mmap.PAGESIZE].zero_()
        touched = size_bytes / (time.perf_counter() - started)
        torch.set_num_threads(before)
    if not torch.cuda.is_available():
        return Rates(touched, None)
    runtime = torch.cuda.cudart()
    started = time.perf_counter()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), size_bytes, 0))
    locked = size_bytes / (time.perf_counter() - started)
    torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))
    return Rates(touched, locked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="of each piece of memory")
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    if torch.cuda.is_available():
        torch.cuda.init()
    all_threads = torch.get_num_threads()
    for huge in (True, False):
        for threads in (all_threads, 1, None):
            for _ in range(2):
                found = measure(int(arguments.gb * GB), huge=huge, threads=threads)
                rates = [
                    f"{name} {rate / GB:.2f} GB/s"
                    for name, rate in (("first write", found.touched), ("locking", found.locked))
                    if rate is not None
                ]
                who = "the driver alone" if threads is None else f"{threads} threads"
                console.print(f"{'huge' if huge else 'small'} pages, {who}: {', '.join(rates) or 'no GPU'}")


if __name__ == "__main__":
    main()
