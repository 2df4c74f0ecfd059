import psutil
import pytest
import torch

from engine.model.config import parse_model_config
from engine.model.state import make_state
from tools.make_checkpoint import checkpoint_config

CPU = torch.device("cpu")
POOL_BYTES = 2 << 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_pool_takes_memory_only_as_it_fills(dtype: torch.dtype) -> None:
    config = parse_model_config(checkpoint_config("tiny"))
    a_block = config.kv_layers * 64 * config.latent_dim * dtype.itemsize
    process = psutil.Process()
    before = process.memory_info().rss
    pool = make_state(config, CPU, blocks=POOL_BYTES // a_block, positions=64, rows=1, kv_dtype=dtype).kv_pool
    assert process.memory_info().rss - before < POOL_BYTES // 8
    assert (pool.dtype, pool.is_contiguous(), pool.nbytes > POOL_BYTES) == (dtype, True, True)
    values = torch.ones(64, config.latent_dim).to(dtype)
    pool[0, 7] = values
    assert torch.equal(pool[0, 7].float(), values.float())
    assert not pool[:, 8].float().any() and not pool[-1, -1].float().any()
