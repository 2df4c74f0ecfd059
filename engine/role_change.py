"""What a rank that keeps its weights can be configured with next. Pure."""

from typing import Any

from engine.config import EngineConfig
from engine.parallel.layout import Layout
from mesh.errors import ConfigError

# Loading does not depend on these keys: the pool, the steps and the graphs are made again.
MAY_DIFFER = frozenset(
    {
        "model_name",
        # They choose other settings, which are compared.
        "aim",
        "exact",
        "kv_dtype",
        "kv_scale",
        "kv_namespace",
        "prompt_attention_dtype",
        "decode_graphs",
        "graph_rows",
        "prompt_graph_tokens",
        "warm_up",
        "max_requests",
        "max_step_tokens",
        "mixed_step_ms",
        "prompt_share",
        "total_blocks",
        "host_blocks",
        "kv_memory_fraction",
        "memory_share",
        "context_tokens",
        "overlap",
        "prefix_cache",
        "transfer",
        "oracle",
        # Loading depends on parts of these three, which `_loaded_by` compares.
        "parallel",
        "balance",
        "drafts",
    }
)


def check_keeps_weights(before: EngineConfig, after: EngineConfig) -> None:
    """Raises ConfigError, naming the keys, if a rank that was loaded as `before` says cannot serve as `after` says."""
    loaded, wanted = _loaded_by(before), _loaded_by(after)
    changes = ", ".join(
        f"engine.{key} from {loaded[key]} to {wanted[key]}" for key in loaded if loaded[key] != wanted[key]
    )
    if changes:
        remedy = "have it load them again (deepmesh role --reload)"
        raise ConfigError(f"a worker that keeps its weights cannot change {changes}: {remedy}")


def _loaded_by(config: EngineConfig) -> dict[str, Any]:
    """What weights, and their place, depend on."""
    layout, balance = Layout.of(config.parallel), config.settled_balance
    return {
        **config.model_dump(mode="json", exclude=set(MAY_DIFFER)),
        "parallel": f"(tp {layout.tp}, dp {layout.dp}, ep {layout.ep})",
        "balance": f"({balance.redundant} copies, moved: {balance.interval_steps is not None})",
        # The draft layer is loaded if there are any.
        "drafts": "some" if config.drafts.most else "none",
    }
