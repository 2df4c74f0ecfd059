"""Builds a worker's identity, once its ranks have loaded."""

from engine.config import EngineConfig
from engine.parallel.layout import Layout
from engine.protocol.messages import Ready
from mesh.domain.workers import WorkerIdentity, WorkerRole


def worker_identity(
    ready: Ready,
    role: WorkerRole,
    worker_id: str,
    incarnation: str,
    endpoint: str,
    engine: EngineConfig,
    can_prefill: bool = True,
) -> WorkerIdentity:
    """`incarnation`: new at every start; `endpoint`: host:port of the worker's gRPC services; `engine`: the
    configuration of its ranks.
    """
    layout, transfer = Layout.of(engine.parallel), engine.transfer
    return WorkerIdentity(
        worker_id=worker_id,
        incarnation=incarnation,
        role=role,
        endpoint=endpoint,
        model=ready.model,
        kv_namespace=ready.namespace,
        context_tokens=ready.context_tokens,
        total_blocks=ready.total_blocks,
        max_requests=ready.max_requests,
        can_prefill=can_prefill,
        vocabulary_size=ready.vocabulary_size,
        block_bytes=ready.block_bytes,
        receives_kv=ready.transfer_address is not None,
        layerwise_tokens=transfer.layerwise_tokens if transfer else None,
        slot_bytes=ready.segment_bytes,
        ranks=layout.dp,
        worker_class=f"{ready.device_name}, tp {layout.tp}, dp {layout.dp}, ep {layout.ep}"
        + (f", hosts {layout.hosts}" if layout.hosts > 1 else ""),
        sparse_prefill=engine.sparse_prefill.offered,
        max_step_tokens=engine.max_step_tokens,
        prompt_wait_steps=engine.parallel.prompt_wait_steps,
        divided_tokens=engine.parallel.divided_tokens,
        speed=ready.speed,
    )
