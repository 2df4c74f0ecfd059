"""Experts' outputs as CUDA kernels that add them up take them: `cuda/expert_sum.cuh`."""

import ctypes

from kernels.moe_permute.experts import ExpertOutputs


class ExpertSum(ctypes.Structure):
    """`ExpertSum` of the source."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, outputs: ExpertOutputs) -> "ExpertSum":
        shared = None if outputs.shared is None else outputs.shared.data_ptr()
        return cls(outputs.rows.data_ptr(), outputs.positions.data_ptr(), outputs.weights.data_ptr(), shared)
