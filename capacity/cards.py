"""The cards that `deepmesh plan` knows: one is measured, and the others are what their datasheets say."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from capacity.ceilings import Ceilings

MEASURED_BY = "measured by bench.rank (docs/performance.md)"


@dataclass(frozen=True)
class Gpu:
    """`ceilings`: the rates that the card keeps up. `link_rate`: bytes a second from host memory. `source`: where the
    figures come from, in words.
    """

    memory_bytes: float
    ceilings: Ceilings
    link_rate: float
    source: str = MEASURED_BY

    @property
    def measured(self) -> bool:
        return self.source == MEASURED_BY


@dataclass(frozen=True)
class Datasheet:
    """What a card's maker publishes. FLOP rates are dense, with sums in float32; `fp8_flops` is None if the card
    has no FP8: such weights are multiplied in bf16. `link_rate` is PCIe's in one direction.
    """

    title: str
    memory_bytes: float
    bytes_per_second: float
    bf16_flops: float
    fp8_flops: float | None
    link_rate: float


PCIE_4, PCIE_5 = 32e9, 64e9
H200 = Gpu(149.2e9, Ceilings(4.24e12, 692e12, 1288e12), 55e9)
# The same card by its datasheet (SXM).
_H200_SHEET = Ceilings(4.8e12, 989e12, 1979e12)
_SHEETS: Mapping[str, Datasheet] = MappingProxyType(
    {
        "h100": Datasheet("NVIDIA H100 datasheet, SXM", 80e9, 3.35e12, 989e12, 1979e12, PCIE_5),
        "h20": Datasheet("server makers' data of NVIDIA H20, SXM", 96e9, 4.0e12, 148e12, 296e12, PCIE_5),
        "h800": Datasheet("server makers' data of NVIDIA H800, SXM", 80e9, 3.35e12, 989e12, 1979e12, PCIE_5),
        "a100": Datasheet("NVIDIA A100 datasheet, SXM 80 GB", 80e9, 2.039e12, 312e12, None, PCIE_4),
        "l40s": Datasheet("NVIDIA L40S datasheet", 48e9, 0.864e12, 362e12, 733e12, PCIE_4),
        "rtx4090": Datasheet("NVIDIA Ada whitepaper, RTX 4090", 24e9, 1.008e12, 165.2e12, 330.3e12, PCIE_4),
        "b200": Datasheet("NVIDIA HGX B200 datasheet", 180e9, 8.0e12, 2250e12, 4500e12, PCIE_5),
    }
)


def _of_sheet(sheet: Datasheet) -> Gpu:
    """A card that keeps up the shares of its datasheet's rates that the measured card keeps up of its own."""
    measured, fp8_flops = H200.ceilings, sheet.fp8_flops
    bf16_flops = sheet.bf16_flops * measured.bf16_flops / _H200_SHEET.bf16_flops
    ceilings = Ceilings(
        sheet.bytes_per_second * measured.bytes_per_second / _H200_SHEET.bytes_per_second,
        bf16_flops,
        bf16_flops if fp8_flops is None else fp8_flops * measured.fp8_flops / _H200_SHEET.fp8_flops,
    )
    return Gpu(sheet.memory_bytes, ceilings, sheet.link_rate * H200.link_rate / PCIE_5, sheet.title)


GPUS: Mapping[str, Gpu] = MappingProxyType({"h200": H200, **{name: _of_sheet(each) for name, each in _SHEETS.items()}})
