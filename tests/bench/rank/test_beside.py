"""A long prompt beside requests that decode, measured on the oracle."""

from bench.rank.beside import measure_beside, table_of, tokens_per_second_alone
from engine.oracle import OracleBackend
from tests.support.engines import oracle_config


def test_the_longer_steps_may_take_the_faster_is_the_prompt() -> None:
    oracle = {"step_ms": 1.0, "prefill_tokens_per_second": 100_000.0}
    config = oracle_config(max_requests=5, max_step_tokens=2048, total_blocks=1000, oracle=oracle)
    backend = OracleBackend(config)
    alone = tokens_per_second_alone(config, backend, 40_000, 4096)
    short, long = (
        measure_beside(config.model_copy(update={"mixed_step_ms": ms}), backend, 4, 40_000) for ms in (2.0, 8.0)
    )
    assert 0 < short.prompt_tokens_per_second < long.prompt_tokens_per_second < 1.1 * alone
    assert 1.0 <= short.quiet_ms < short.tpot_ms < long.tpot_ms
    assert table_of([short, long], alone, "").row_count == 2
