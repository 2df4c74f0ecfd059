"""The highest rates of a device, from which floors are computed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """Bytes read and written per second of a large copy; multiply-adds count twice in the FLOP rates."""

    bytes_per_second: float
    bf16_flops: float
    fp8_flops: float

    def __str__(self) -> str:
        return (
            f"copy {self.bytes_per_second / 1e12:.2f} TB/s, bf16 {self.bf16_flops / 1e12:.0f} and"
            f" fp8 {self.fp8_flops / 1e12:.0f} TFLOP/s"
        )

    def seconds(self, size_bytes: float, flops: float, *, fp8: bool) -> float:
        """The least time for moving this many bytes and computing this many FLOPs, both at once."""
        return max(size_bytes / self.bytes_per_second, flops / (self.fp8_flops if fp8 else self.bf16_flops))
