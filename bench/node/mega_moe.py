"""deep_gemm's layer of routed experts over the ranks of a host, in one kernel: dispatch, both products, SwiGLU, sums.

Written for sgl-deep-gemm 0.1.4.post1 on Hopper cards. The package compiles with the CUDA toolkit's nvcc when a kernel
is first called (some ten seconds each; CUDA_HOME must have it), and keeps what it compiled in ~/.deep_gemm.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

import torch
from torch import distributed

from kernels.act_quant import GROUP

# By function of the package, the parameters that we pass.
INTERFACE: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "get_symm_buffer_for_sm90_mega_moe": (
            "group",
            "num_experts",
            "num_max_tokens_per_rank",
            "num_topk",
            "hidden",
            "intermediate_hidden",
        ),
        "transform_weights_for_mega_moe_sm90": ("l1_weights", "l2_weights"),
        "mega_moe_pre_dispatch_sm90": (
            "x",
            "topk_idx",
            "topk_weights",
            "buf_x",
            "buf_x_sf",
            "buf_topk_idx",
            "buf_topk_weights",
            "num_tokens",
            "group_size",
        ),
        "fp8_mega_moe": ("y", "l1_weights", "l2_weights", "sym_buffer"),
    }
)


def check_interface(package: ModuleType) -> None:
    """Raises ImportError if the package lacks a function or a parameter, and says which."""
    lacking = [name for name in INTERFACE if not hasattr(package, name)]
    for name in INTERFACE.keys() - lacking:
        known = inspect.signature(getattr(package, name)).parameters
        lacking += [f"{name}({parameter})" for parameter in INTERFACE[name] if parameter not in known]
    if lacking:
        version = getattr(package, "__version__", "of unknown version")
        raise ImportError(f"deep_gemm {version} lacks {', '.join(sorted(lacking))}")


@dataclass(frozen=True)
class MegaWeights:
    """One layer's weights, each as values and block scales."""

    gate_up: tuple[torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor]


class MegaMoe:
    """One rank's part. All layers on a stream may share its symmetric memory, because a kernel ends only when all ranks
    have read it.
    """

    def __init__(
        self,
        package: ModuleType,
        group: distributed.ProcessGroup,
        experts: int,
        choices: int,
        most_tokens: int,
        hidden: int,
        width: int,
    ) -> None:
        """Called by all ranks at once. package: deep_gemm; experts: of all ranks; most_tokens: of one rank, which the
        package rounds up to a multiple of 384.
        """
        check_interface(package)
        self._package = package
        self._buffer = package.get_symm_buffer_for_sm90_mega_moe(
            group=group,
            num_experts=experts,
            num_max_tokens_per_rank=most_tokens,
            num_topk=choices,
            hidden=hidden,
            intermediate_hidden=width,
        )

    def weights(self, published: Sequence[torch.Tensor]) -> MegaWeights:
        """published: values and scales of gate and up, then of down, as `BlockFp8Experts.weights` has them. Values of
        gate and up are copied, since the kernel wants eight outputs of each in turn; all else is shared.
        """
        gate_up, gate_up_scales, down, down_scales = published
        transformed = self._package.transform_weights_for_mega_moe_sm90(
            l1_weights=(gate_up, gate_up_scales), l2_weights=(down, down_scales)
        )
        return MegaWeights(*transformed)

    def call(
        self, weights: MegaWeights, hidden: torch.Tensor, choices: torch.Tensor, factors: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """A function that computes the sums of this rank's rows, into the same tensor each time. hidden: [tokens,
        hidden] bfloat16; choices: [tokens, k] int64, which the package takes in 32 bits; factors: [tokens, k] float32.
        """
        package, buffer = self._package, self._buffer
        narrow, sums = choices.int(), torch.empty_like(hidden)

        def compute() -> torch.Tensor:
            package.mega_moe_pre_dispatch_sm90(
                x=hidden,
                topk_idx=narrow,
                topk_weights=factors,
                buf_x=buffer.x,
                buf_x_sf=buffer.x_sf,
                buf_topk_idx=buffer.topk_idx,
                buf_topk_weights=buffer.topk_weights,
                num_tokens=hidden.shape[0],
                group_size=GROUP,
            )
            package.fp8_mega_moe(y=sums, l1_weights=weights.gate_up, l2_weights=weights.down, sym_buffer=buffer)
            return sums

        return compute

    def close(self) -> None:
        self._buffer.destroy()
