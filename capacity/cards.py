"""The cards that `deepmesh plan` knows: one is measured, and the others are what their datasheets say.

Rates are those of NVIDIA's datasheets of H100, H200, A100, L40S and HGX B200 and of its whitepapers of the Ada and RTX
Blackwell architectures, as retailers and clouds repeat them (most quote FLOP rates of sparse matrices, twice the dense
ones, and of the RTX 5090 those with sums in float16, twice as many again). H20 and H800 have no public datasheet, and
server makers agree on theirs. The B200's 8 TB/s became 7.7: its driver reports a bus of 7,680 bits at 3,996 MHz
(github.com/pytorch/ao/pull/4002).

A datasheet's gigabytes of memory are neither 10^9 nor 2^30 bytes, so memory is what nvidia-smi shows: of H100, A100 and
L40S by github.com/modal-labs/modal-client/pull/2797, of the RTX 4090 by github.com/RLinf/RLinf/issues/255, of the RTX
5090 by github.com/noonghunna/club-3090/issues/617, of the B200 by github.com/NVIDIA/TensorRT-LLM/issues/10278. The H20
is taken to have as much of its 96 GiB as the H100 of 80.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from capacity.ceilings import Ceilings
from mesh.config_keys import did_you_mean
from mesh.errors import ConfigError

MEASURED_BY = "measured by bench.rank (docs/performance.md)"


@dataclass(frozen=True)
class Gpu:
    """`ceilings`: the rates that the card keeps up. `link_rate`: bytes a second from host memory. `capability`: the
    compute capability, major and minor. `source`: where the figures come from, in words.
    """

    memory_bytes: float
    ceilings: Ceilings
    link_rate: float
    capability: tuple[int, int]
    source: str = MEASURED_BY

    @property
    def measured(self) -> bool:
        return self.source == MEASURED_BY


@dataclass(frozen=True)
class Datasheet:
    """What a card's maker publishes. FLOP rates are dense, with sums in float32; `fp8_flops` is None if the card
    has no FP8: such weights are multiplied in bf16. `link_rate` is PCIe's in one direction. `memory_mib`: of
    nvidia-smi.
    """

    title: str
    capability: tuple[int, int]
    memory_mib: int
    bytes_per_second: float
    bf16_flops: float
    fp8_flops: float | None
    link_rate: float


PCIE_4, PCIE_5 = 32e9, 64e9
H200 = Gpu(149.2e9, Ceilings(4.24e12, 692e12, 1288e12), 55e9, (9, 0))
# The same card by its datasheet (SXM).
_H200_SHEET = Datasheet("NVIDIA H200 datasheet, SXM", (9, 0), 143_771, 4.8e12, 989e12, 1979e12, PCIE_5)
_SHEETS: Mapping[str, Datasheet] = MappingProxyType(
    {
        "h100": Datasheet("NVIDIA H100 datasheet, SXM", (9, 0), 81_559, 3.35e12, 989e12, 1979e12, PCIE_5),
        "h20": Datasheet("server makers' data of NVIDIA H20, SXM", (9, 0), 97_871, 4.0e12, 148e12, 296e12, PCIE_5),
        "h800": Datasheet("server makers' data of NVIDIA H800, SXM", (9, 0), 81_559, 3.35e12, 989e12, 1979e12, PCIE_5),
        "a100": Datasheet("NVIDIA A100 datasheet, SXM 80 GB", (8, 0), 81_920, 2.039e12, 312e12, None, PCIE_4),
        "l40s": Datasheet("NVIDIA L40S datasheet", (8, 9), 46_068, 0.864e12, 362e12, 733e12, PCIE_4),
        "rtx4090": Datasheet("NVIDIA Ada whitepaper, RTX 4090", (8, 9), 24_564, 1.008e12, 165.2e12, 330.3e12, PCIE_4),
        "rtx5090": Datasheet(
            "NVIDIA RTX Blackwell whitepaper, RTX 5090", (12, 0), 32_607, 1.792e12, 209.5e12, 419e12, PCIE_5
        ),
        "b200": Datasheet("NVIDIA HGX B200 datasheet", (10, 0), 183_359, 7.7e12, 2250e12, 4500e12, PCIE_5),
    }
)


def _of_sheet(sheet: Datasheet) -> Gpu:
    """A card that keeps up the shares of its datasheet's rates that the measured card keeps up of its own, and has as
    much of its memory free for a process.
    """
    measured, fp8_flops, like = H200.ceilings, sheet.fp8_flops, _H200_SHEET
    assert like.fp8_flops is not None
    bf16_flops = sheet.bf16_flops * measured.bf16_flops / like.bf16_flops
    ceilings = Ceilings(
        sheet.bytes_per_second * measured.bytes_per_second / like.bytes_per_second,
        bf16_flops,
        bf16_flops if fp8_flops is None else fp8_flops * measured.fp8_flops / like.fp8_flops,
    )
    memory_bytes = sheet.memory_mib * H200.memory_bytes / like.memory_mib
    return Gpu(memory_bytes, ceilings, sheet.link_rate * H200.link_rate / PCIE_5, sheet.capability, sheet.title)


GPUS: Mapping[str, Gpu] = MappingProxyType({"h200": H200, **{name: _of_sheet(each) for name, each in _SHEETS.items()}})


def find_gpu(name: str) -> Gpu:
    """By the name that `--gpu` takes, in capitals or not. Raises ConfigError."""
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError(f"--gpu {name}: unknown{did_you_mean(name.lower(), GPUS)}; known are {', '.join(GPUS)}")
    return found
