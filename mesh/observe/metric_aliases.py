"""vLLM's names for those of our metrics that mean the same, so that its dashboards and autoscalers work."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# Our names to vLLM's; counters without "_total".
ALIASES: Mapping[str, str] = {
    "deepmesh_gateway_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "deepmesh_gateway_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "deepmesh_gateway_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "deepmesh_gateway_end_to_end_seconds": "vllm:e2e_request_latency_seconds",
    "deepmesh_gateway_request_prompt_tokens": "vllm:request_prompt_tokens",
    "deepmesh_gateway_request_output_tokens": "vllm:request_generation_tokens",
    "deepmesh_gateway_prompt_tokens": "vllm:prompt_tokens",
    "deepmesh_gateway_output_tokens": "vllm:generation_tokens",
    "deepmesh_engine_running_requests": "vllm:num_requests_running",
    "deepmesh_engine_waiting_requests": "vllm:num_requests_waiting",
    "deepmesh_engine_kv_usage": "vllm:kv_cache_usage_perc",
}
_LABELS = {"model": "model_name"}


class Aliases(Collector):
    """Repeats the metrics of `collectors` under the other names; those without a series yet are left out."""

    def __init__(self, collectors: Sequence[Collector], registry: CollectorRegistry = REGISTRY) -> None:
        self._collectors = collectors
        registry.register(self)

    def describe(self) -> list[Metric]:
        """Empty, because the registry would have to collect everything to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            for metric in collector.collect():
                if metric.samples:
                    yield _renamed(metric, ALIASES[metric.name])


def _renamed(metric: Metric, name: str) -> Metric:
    alias = Metric(name, metric.documentation, metric.type)
    alias.samples = [
        sample._replace(
            name=name + sample.name.removeprefix(metric.name),
            labels={_LABELS.get(label, label): value for label, value in sample.labels.items()},
        )
        for sample in metric.samples
    ]
    return alias
