import pytest
import torch

from kernels.mla_prefill.keys import join_keys

triton_keys = pytest.importorskip("kernels.mla_prefill.triton_keys")


@pytest.mark.parametrize(
    ("keys", "heads", "nope", "rope"), [(5, 3, 32, 16), (1, 20, 128, 64), (4, 16, 24, 8), (0, 2, 8, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_has_its_own_part_and_the_shared_one(
    device: torch.device, dtype: torch.dtype, keys: int, heads: int, nope: int, rope: int
) -> None:
    expanded = torch.randn(keys, heads, nope + 40, device=device).to(dtype)
    latents = torch.randn(keys, 100 + rope, device=device).to(dtype)
    own, shared = expanded[:, :, :nope], latents[:, 100:]
    found = triton_keys.join_keys(own, shared)
    assert torch.equal(found, torch.cat([own, shared.unsqueeze(1).expand(-1, heads, -1)], dim=2))
    assert torch.equal(join_keys(own, shared), found)
