"""Every metric's name. A service imports those that it sets; its process exports the others as zero."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_MICROSECONDS_UP = (1e-5, 1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

SPAN_SECONDS = Histogram("deepmesh_span_seconds", "Time in a span", ["name"], buckets=_MICROSECONDS_UP)

# Every gRPC server.
RPC_STARTED = Counter("deepmesh_rpc_started_total", "Calls begun", ["method"])
RPC_HANDLED = Counter("deepmesh_rpc_handled_total", "Calls ended", ["method", "code"])
RPC_SHED = Counter("deepmesh_rpc_shed_total", "Calls refused because a server had too many", ["method"])
RPC_SECONDS = Histogram("deepmesh_rpc_seconds", "Time from a call's begin to its end", ["method"], buckets=_SECONDS)

# Gateway.
GATEWAY_REQUESTS = Counter("deepmesh_gateway_requests_total", "Generations ended", ["model", "api", "outcome"])
GATEWAY_HTTP_CLOSED = Counter("deepmesh_gateway_http_closed_total", "HTTP connections that we closed", ["why"])
GATEWAY_PROMPT_TOKENS = Counter("deepmesh_gateway_prompt_tokens_total", "Prompt tokens of accepted requests", ["model"])
GATEWAY_CACHED_TOKENS = Counter("deepmesh_gateway_cached_tokens_total", "Prompt tokens found in a cache", ["model"])
GATEWAY_OUTPUT_TOKENS = Counter("deepmesh_gateway_output_tokens_total", "Tokens generated", ["model"])
GATEWAY_TTFT_SECONDS = Histogram(
    "deepmesh_gateway_time_to_first_token_seconds", "Arrival to first token", ["model"], buckets=_SECONDS
)
GATEWAY_TPOT_SECONDS = Histogram(
    "deepmesh_gateway_time_per_output_token_seconds",
    "Mean time per token after the first, per request",
    ["model"],
    buckets=_SECONDS,
)
GATEWAY_LIVE_GENERATIONS = Gauge("deepmesh_gateway_live_generations", "Generations not ended yet")
GATEWAY_UNREAD_TOKENS = Gauge("deepmesh_gateway_unread_tokens", "Tokens received that clients have not read")
GATEWAY_WORKER_LINKS = Gauge("deepmesh_gateway_worker_links", "Streams to decode workers that are up")
GATEWAY_REPLACEMENTS = Counter("deepmesh_gateway_replacements_total", "Requests placed again", ["reason"])

# Scheduler.
SCHEDULER_PLACEMENTS = Counter("deepmesh_scheduler_placements_total", "Placements by how they ended", ["outcome"])
SCHEDULER_REFUSALS = Counter("deepmesh_scheduler_refusals_total", "Place calls refused", ["reason"])
SCHEDULER_WORKERS = Gauge("deepmesh_scheduler_workers", "Workers with a live lease", ["role"])
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
ENGINE_BLOCKS_TOTAL = Gauge("deepmesh_engine_blocks_total", "Blocks in the KV pool")
ENGINE_RUNNING = Gauge("deepmesh_engine_running_requests", "Requests in the running batch")
ENGINE_WAITING = Gauge("deepmesh_engine_waiting_requests", "Requests waiting for room")
ENGINE_QUEUED_PREFILL_TOKENS = Gauge("deepmesh_engine_queued_prefill_tokens", "Prompt tokens not computed yet")
ENGINE_DRAFTS = Counter(
    "deepmesh_engine_drafts_total",
    "Drafts verified, by their place behind a drawn token (1 is next to it); rows bring 1 + accepted tokens",
    ["place", "outcome"],
)
ENGINE_STORE_CACHED_TOKENS = Counter(
    "deepmesh_engine_store_cached_tokens_total", "Prompt tokens of requests that came from a KV store"
)
TRANSFER_OPEN = Gauge("deepmesh_transfer_open", "KV transfers that have not ended", ["kind"])
TRANSFER_SLOTS_FREE = Gauge("deepmesh_transfer_slots_free", "Staging slots that no transfer holds")
TRANSFER_SLOTS_QUARANTINED = Gauge("deepmesh_transfer_slots_quarantined", "Staging slots that late bytes may reach")
TRANSFER_BYTES = Gauge("deepmesh_transfer_bytes", "KV moved since the start", ["direction", "transport"])
TRANSFER_REFUSED = Gauge(
    "deepmesh_transfer_refused", "Tickets, segments and messages refused since the start", ["reason"]
)
DECODE_PREFILLS = Counter("deepmesh_decode_prefills_total", "Prompts computed elsewhere, by their end", ["outcome"])

# Prefill worker.
PREFILL_LIVE_PROMPTS = Gauge("deepmesh_prefill_live_prompts", "Prefill calls accepted and not ended")
PREFILL_PROMPT_TOKENS = Counter("deepmesh_prefill_prompt_tokens_total", "Prompt tokens of accepted calls")
PREFILL_CACHED_TOKENS = Counter("deepmesh_prefill_cached_tokens_total", "Prompt tokens found in the cache")
PREFILL_PUSHED_BYTES = Counter("deepmesh_prefill_pushed_bytes_total", "KV pushed to decode workers", ["transport"])
PREFILL_ENDED = Counter("deepmesh_prefill_ended_total", "Prefill calls by how they ended", ["outcome"])

# KV store.
KVSTORE_BLOCKS_USED = Gauge("deepmesh_kvstore_blocks_used", "Blocks with content")
KVSTORE_BLOCKS_TOTAL = Gauge("deepmesh_kvstore_blocks_total", "Blocks in the slab")
KVSTORE_SESSIONS = Gauge("deepmesh_kvstore_sessions", "Workers attached")
KVSTORE_LOOKUPS = Counter("deepmesh_kvstore_lookups_total", "Lookups over UCX", ["outcome"])
KVSTORE_MATCHED_BLOCKS = Counter("deepmesh_kvstore_matched_blocks_total", "Blocks that lookups found")
KVSTORE_STORED_BLOCKS = Counter("deepmesh_kvstore_stored_blocks_total", "Offered blocks that became visible")
KVSTORE_EVICTED_BLOCKS = Counter("deepmesh_kvstore_evicted_blocks_total", "Blocks that made room for others")
KVSTORE_OFFERS = Counter("deepmesh_kvstore_offers_total", "Offers by how they ended", ["outcome"])
KVSTORE_REFUSALS = Counter("deepmesh_kvstore_refusals_total", "Calls refused", ["reason"])
KVSTORE_INDEX_FAILURES = Counter("deepmesh_kvstore_index_failures_total", "Calls of the index that failed")
KVSTORE_INDEX_REBUILDS = Counter("deepmesh_kvstore_index_rebuilds_total", "Times all blocks were published anew")

# A worker's client of the KV stores.
STORE_OFFERS = Counter("deepmesh_store_offers_total", "Chains offered to KV stores, by their end", ["outcome"])
