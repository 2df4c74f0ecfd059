"""The names of all metrics. A service imports those that it sets; its process exports the others as zero."""

from prometheus_client import Counter, Gauge, Histogram

from mesh.observe.metric_aliases import Aliases
from mesh.observe.quick_histogram import QuickHistogram

# The buckets are narrow around 20 ms, where objectives for the time per token lie.
_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.012, 0.014, 0.016, 0.018, 0.02, 0.022, 0.024, 0.026),
    *(0.028, 0.03, 0.035, 0.04, 0.045, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
_REQUEST_SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3840.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_MICROSECONDS_UP = (1e-5, 1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

# Every process.
LOG_LINES_LOST = Counter("deepmesh_log_lines_lost_total", "Log lines that could not be written")
SPAN_SECONDS = Histogram("deepmesh_span_seconds", "Time in a span", ["name"], buckets=_MICROSECONDS_UP)

# Every gRPC server.
RPC_STARTED = Counter("deepmesh_rpc_started_total", "Calls begun", ["method"])
RPC_HANDLED = Counter("deepmesh_rpc_handled_total", "Calls ended", ["method", "code"])
RPC_SHED = Counter("deepmesh_rpc_shed_total", "Calls refused because a server had too many", ["method"])
RPC_SECONDS = Histogram("deepmesh_rpc_seconds", "Time from a call's begin to its end", ["method"], buckets=_SECONDS)

# Gateway.
GATEWAY_REQUESTS = Counter("deepmesh_gateway_requests_total", "Generations ended", ["model", "api", "outcome"])
GATEWAY_HTTP_CLOSED = Counter("deepmesh_gateway_http_closed_total", "HTTP connections that we closed", ["why"])
GATEWAY_RESPONSE_STORE_FAILURES = Counter(
    "deepmesh_gateway_response_store_failures_total", "Calls to the store of responses that failed"
)
GATEWAY_PROMPT_TOKENS = Counter("deepmesh_gateway_prompt_tokens_total", "Prompt tokens of accepted requests", ["model"])
GATEWAY_CACHED_TOKENS = Counter("deepmesh_gateway_cached_tokens_total", "Prompt tokens found in a cache", ["model"])
GATEWAY_OUTPUT_TOKENS = Counter("deepmesh_gateway_output_tokens_total", "Tokens generated", ["model"])
GATEWAY_TTFT_SECONDS = Histogram(
    "deepmesh_gateway_time_to_first_token_seconds", "Arrival to first token", ["model"], buckets=_REQUEST_SECONDS
)
GATEWAY_END_TO_END_SECONDS = Histogram(
    "deepmesh_gateway_end_to_end_seconds", "Arrival to the end of the answer", ["model"], buckets=_REQUEST_SECONDS
)
GATEWAY_QUEUE_SECONDS = Histogram(
    "deepmesh_gateway_queue_seconds", "Arrival to the placement on a worker", ["model"], buckets=_REQUEST_SECONDS
)
GATEWAY_ITL_SECONDS = QuickHistogram(
    "deepmesh_gateway_inter_token_latency_seconds",
    "Every gap between two arrivals of tokens of one request",
    "model",
    _TOKEN_SECONDS,
)
GATEWAY_REQUEST_PROMPT_TOKENS = Histogram(
    "deepmesh_gateway_request_prompt_tokens", "Length of prompts", ["model"], buckets=_TOKENS
)
GATEWAY_REQUEST_OUTPUT_TOKENS = Histogram(
    "deepmesh_gateway_request_output_tokens", "Length of answers", ["model"], buckets=_TOKENS
)
GATEWAY_ACCEPTED = Counter("deepmesh_gateway_accepted_total", "Generations placed on a worker", ["tenant", "api"])
GATEWAY_REFUSALS = Counter(
    "deepmesh_gateway_refusals_total", "Generations refused before they began", ["tenant", "api", "reason"]
)
HTTP_RESPONSES = Counter("deepmesh_http_responses_total", "HTTP responses begun", ["path", "status"])
GATEWAY_TPOT_SECONDS = Histogram(
    "deepmesh_gateway_time_per_output_token_seconds",
    "Mean time per token after the first, per request",
    ["model"],
    buckets=_TOKEN_SECONDS,
)
GATEWAY_LIVE_GENERATIONS = Gauge("deepmesh_gateway_live_generations", "Generations not ended yet")
GATEWAY_UNREAD_TOKENS = Gauge("deepmesh_gateway_unread_tokens", "Tokens received that clients have not read")
GATEWAY_WORKER_LINKS = Gauge("deepmesh_gateway_worker_links", "Streams to decode workers that are up")
GATEWAY_REPLACEMENTS = Counter("deepmesh_gateway_replacements_total", "Requests placed again", ["reason"])

# Scheduler.
SCHEDULER_PLACEMENTS = Counter("deepmesh_scheduler_placements_total", "Placements by how they ended", ["outcome"])
SCHEDULER_REFUSALS = Counter("deepmesh_scheduler_refusals_total", "Place calls refused", ["reason"])
SCHEDULER_WORKERS = Gauge("deepmesh_scheduler_workers", "Workers with a live lease", ["role"])
SCHEDULER_WANTED_REPLICAS = Gauge(
    "deepmesh_scheduler_wanted_replicas", "Workers that the load asks for", ["model", "role"]
)
SCHEDULER_DECISION_SECONDS = Histogram(
    "deepmesh_scheduler_decision_seconds", "Time to decide one placement", buckets=_MICROSECONDS_UP
)

# Decode worker; the engine's figures are those of its latest step.
DECODE_LIVE_REQUESTS = Gauge("deepmesh_decode_live_requests", "Requests accepted and not ended")
DECODE_UNACKNOWLEDGED = Gauge("deepmesh_decode_unacknowledged", "Ended requests that the gateway has not acknowledged")
DECODE_GATEWAYS = Gauge("deepmesh_decode_gateways", "Gateways attached")
DECODE_OUTPUT_TOKENS = Counter("deepmesh_decode_output_tokens_total", "Tokens generated")
DECODE_CACHED_TOKENS = Counter("deepmesh_decode_cached_tokens_total", "Prompt tokens found in the cache")
ENGINE_STEPS = Counter("deepmesh_engine_steps_total", "Steps of the engine")
ENGINE_BLOCKS_FREE = Gauge("deepmesh_engine_blocks_free", "Blocks that no live request holds")
ENGINE_BLOCKS_TOTAL = Gauge("deepmesh_engine_blocks", "Blocks in the KV pool")
ENGINE_KV_USAGE = Gauge("deepmesh_engine_kv_usage", "Share of the KV pool that live requests hold, from 0 to 1")
ENGINE_RUNNING = Gauge("deepmesh_engine_running_requests", "Requests in the running batch")
ENGINE_WAITING = Gauge("deepmesh_engine_waiting_requests", "Requests waiting for room")
ENGINE_QUEUED_PREFILL_TOKENS = Gauge("deepmesh_engine_queued_prefill_tokens", "Prompt tokens not computed yet")
ENGINE_DRAFTS = Counter(
    "deepmesh_engine_drafts_total",
    "Drafts verified, by their place after a drawn token (1 is next to it); rows bring 1 + accepted tokens",
    ["place", "outcome"],
)
ENGINE_DRAFT_ROWS = Counter(
    "deepmesh_engine_draft_rows_total",
    "Rows of requests that decode with drafts, by the tokens that each yielded: their mean is the tokens a step",
    ["tokens"],
)
ENGINE_RELAXED_TOKENS = Counter(
    "deepmesh_engine_relaxed_tokens_total", "Drafts accepted in place of other tokens that were drawn"
)
ENGINE_EXPERT_IMBALANCE = Gauge(
    "deepmesh_engine_expert_imbalance",
    "(largest - mean) / mean of what ranks had to do for routed experts: the mean over the layers, and the largest",
    ["of"],
)
ENGINE_EXPERTS_MOVED = Counter("deepmesh_engine_experts_moved_total", "Experts copied to another rank's slot")
ENGINE_SPARSE_RECALL = Histogram(
    "deepmesh_engine_sparse_recall",
    "Share of the exact attention that a chunk's sparse attention kept: a sample of its queries, in one layer",
    buckets=(0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 1.0),
)
ENGINE_SPARSE_DENSITY = Histogram(
    "deepmesh_engine_sparse_density",
    "Of the blocks of exact attention, the share that a chunk's sparse attention computed in that layer",
    buckets=(0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
)
ENGINE_STORE_CACHED_TOKENS = Counter(
    "deepmesh_engine_store_cached_tokens_total", "Prompt tokens of requests that came from a KV store"
)
ENGINE_HOST_CACHED_TOKENS = Counter(
    "deepmesh_engine_host_cached_tokens_total", "Prompt tokens of requests that came from the ranks' host memory"
)
ENGINE_HOST_BLOCKS_TOTAL = Gauge("deepmesh_engine_host_blocks", "Places for evicted blocks in host memory")
ENGINE_HOST_BLOCKS_USED = Gauge("deepmesh_engine_host_blocks_used", "Blocks in host memory")
ENGINE_HOST_BLOCKS = Counter(
    "deepmesh_engine_host_copied_blocks_total", "Blocks copied between the KV pool and host memory", ["direction"]
)
WORKER_MISSING_HOSTS = Gauge(
    "deepmesh_worker_missing_hosts", "Hosts of a worker on several hosts that it waits for, or serves without"
)
# Figures of single DP ranks.
RANK_BLOCKS_FREE = Gauge("deepmesh_rank_blocks_free", "Blocks of a rank that no live request holds", ["rank"])
RANK_RUNNING = Gauge("deepmesh_rank_running_requests", "Requests in a rank's running batch", ["rank"])
RANK_WAITING = Gauge("deepmesh_rank_waiting_requests", "Requests waiting for room on a rank", ["rank"])
RANK_QUEUED_PREFILL_TOKENS = Gauge(
    "deepmesh_rank_queued_prefill_tokens", "Prompt tokens that a rank has not computed yet", ["rank"]
)
TRANSFER_OPEN = Gauge("deepmesh_transfer_open", "KV transfers that have not ended", ["kind"])
TRANSFER_SLOTS_FREE = Gauge("deepmesh_transfer_slots_free", "Staging slots that no transfer holds")
TRANSFER_SLOTS_QUARANTINED = Gauge("deepmesh_transfer_slots_quarantined", "Staging slots that late bytes may reach")
TRANSFER_BYTES = Counter("deepmesh_transfer_bytes_total", "KV moved", ["direction", "transport"])
TRANSFER_LOCAL_TCP_BYTES = Counter(
    "deepmesh_transfer_local_tcp_bytes_total", "KV received from this host over TCP, or by a GPU through host memory"
)
TRANSFER_REFUSED = Counter("deepmesh_transfer_refused_total", "Tickets, segments and messages refused", ["reason"])
DECODE_PREFILLS = Counter("deepmesh_decode_prefills_total", "Prompts computed elsewhere, by their end", ["outcome"])

# Prefill worker.
PREFILL_LIVE_PROMPTS = Gauge("deepmesh_prefill_live_prompts", "Prefill calls accepted and not ended")
PREFILL_PROMPT_TOKENS = Counter("deepmesh_prefill_prompt_tokens_total", "Prompt tokens of accepted calls")
PREFILL_CACHED_TOKENS = Counter("deepmesh_prefill_cached_tokens_total", "Prompt tokens found in the cache")
PREFILL_PUSHED_BYTES = Counter("deepmesh_prefill_pushed_bytes_total", "KV pushed to decode workers", ["transport"])
PREFILL_ENDED = Counter("deepmesh_prefill_ended_total", "Prefill calls by how they ended", ["outcome"])

# KV store.
KVSTORE_BLOCKS_USED = Gauge("deepmesh_kvstore_blocks_used", "Blocks with content")
KVSTORE_BLOCKS_TOTAL = Gauge("deepmesh_kvstore_blocks", "Blocks in the slab")
KVSTORE_DISK_BLOCKS_USED = Gauge("deepmesh_kvstore_disk_blocks_used", "Blocks on disk")
KVSTORE_DISK_BLOCKS_TOTAL = Gauge("deepmesh_kvstore_disk_blocks", "Slots for blocks on disk")
KVSTORE_DISK_BLOCKS = Counter("deepmesh_kvstore_disk_transfers_total", "Blocks read and written", ["outcome"])
KVSTORE_SESSIONS = Gauge("deepmesh_kvstore_sessions", "Workers attached")
KVSTORE_LOOKUPS = Counter("deepmesh_kvstore_lookups_total", "Lookups over UCX", ["outcome"])
KVSTORE_MATCHED_BLOCKS = Counter("deepmesh_kvstore_matched_blocks_total", "Blocks that lookups found")
KVSTORE_STORED_BLOCKS = Counter("deepmesh_kvstore_stored_blocks_total", "Offered blocks that became visible")
KVSTORE_EVICTED_BLOCKS = Counter("deepmesh_kvstore_evicted_blocks_total", "Blocks that made room for others")
KVSTORE_TENANT_BLOCKS = Gauge(
    "deepmesh_kvstore_tenant_blocks", "Blocks by whom they were offered for", ["tenant", "tier"]
)
KVSTORE_QUOTA_EVICTED_BLOCKS = Counter(
    "deepmesh_kvstore_quota_evicted_blocks_total",
    "Blocks that made room for others of their tenant, which had its quota",
    ["tenant", "tier"],
)
KVSTORE_OFFERS = Counter("deepmesh_kvstore_offers_total", "Offers by how they ended", ["outcome"])
KVSTORE_REFUSALS = Counter("deepmesh_kvstore_refusals_total", "Calls refused", ["reason"])
KVSTORE_INDEX_FAILURES = Counter("deepmesh_kvstore_index_failures_total", "Calls of the index that failed")
KVSTORE_INDEX_REBUILDS = Counter("deepmesh_kvstore_index_rebuilds_total", "Times all blocks were published again")

# A worker's client of the KV stores.
STORE_OFFERS = Counter("deepmesh_store_offers_total", "Chains offered to KV stores, by their end", ["outcome"])

# vLLM's names for some of these.
Aliases(
    (
        GATEWAY_TTFT_SECONDS,
        GATEWAY_ITL_SECONDS,
        GATEWAY_TPOT_SECONDS,
        GATEWAY_END_TO_END_SECONDS,
        GATEWAY_REQUEST_PROMPT_TOKENS,
        GATEWAY_REQUEST_OUTPUT_TOKENS,
        GATEWAY_PROMPT_TOKENS,
        GATEWAY_OUTPUT_TOKENS,
        ENGINE_RUNNING,
        ENGINE_WAITING,
        ENGINE_KV_USAGE,
    )
)
