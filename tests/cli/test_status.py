from io import StringIO

from deepmesh.internal.v1 import scheduler_pb2, workers_pb2
from rich.console import Console

from cli.status import tables, workers_table


def test_each_rank_of_several_has_a_row_below_its_worker() -> None:
    identity = workers_pb2.WorkerIdentity(worker_id="d", model="oracle", max_requests=8, total_blocks=200, ranks=2)
    ranks = [
        workers_pb2.RankStatus(load=workers_pb2.WorkerLoad(running_requests=count, free_blocks=100 - count))
        for count in (3, 1)
    ]
    load = workers_pb2.WorkerLoad(running_requests=4, free_blocks=196)
    worker = scheduler_pb2.WorkerStatus(identity=identity, load=load, ranks=ranks)
    shown = StringIO()
    Console(width=80, file=shown).print(workers_table(scheduler_pb2.WatchWorkersResponse(workers=[worker])))
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert ["d", "unspecified", "4/8", "0", "0", "4/200", "0", "0", "0.0"] in rows
    assert ["rank", "0", "3/4", "0", "0", "3/100", "0", "0", "0.0"] in rows
    assert ["rank", "1", "1/4", "0", "0", "1/100", "0", "0", "0.0"] in rows


def test_blocks_in_host_memory_are_shown_next_to_the_pools() -> None:
    load = workers_pb2.WorkerLoad(host_tier=workers_pb2.HostTierStatus(total_blocks=5000, used_blocks=1234))
    identity = workers_pb2.WorkerIdentity(worker_id="decode-0", total_blocks=100, max_requests=8, ranks=1)
    worker = scheduler_pb2.WorkerStatus(identity=identity, load=load, cached_blocks=77)
    shown = StringIO()
    Console(width=100, file=shown).print(workers_table(scheduler_pb2.WatchWorkersResponse(workers=[worker])))
    assert "77" in shown.getvalue() and "+ 1,234 on host" in shown.getvalue()


def test_a_silent_worker_is_not_said_to_serve() -> None:
    identity = workers_pb2.WorkerIdentity(worker_id="d", model="oracle", max_requests=8, total_blocks=200)
    worker = scheduler_pb2.WorkerStatus(identity=identity, state=workers_pb2.WORKER_STATE_SERVING, silent=True)
    shown = StringIO()
    Console(width=80, file=shown).print(workers_table(scheduler_pb2.WatchWorkersResponse(workers=[worker])))
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert [row[1] for row in rows if row[:1] == ["d"]] == ["silent"]


def test_a_prefill_worker_with_unreadable_kv_is_named() -> None:
    def status(worker_id: str, role: workers_pb2.WorkerRole, dtype: str) -> scheduler_pb2.WorkerStatus:
        namespace = workers_pb2.KvNamespace(weights_fingerprint="f", dtype=dtype, layers=1, layout="mla:512+64")
        identity = workers_pb2.WorkerIdentity(
            worker_id=worker_id, role=role, model="r1", kv_namespace=namespace, receives_kv=True
        )
        return scheduler_pb2.WorkerStatus(identity=identity)

    def shown(*workers: scheduler_pb2.WorkerStatus) -> str:
        text = StringIO()
        Console(width=80, file=text).print(workers_table(scheduler_pb2.WatchWorkersResponse(workers=workers)))
        return " ".join(text.getvalue().split())

    prefill = status("prefill-0", workers_pb2.WORKER_ROLE_PREFILL, "bfloat16")
    other, reader = (status(dtype, workers_pb2.WORKER_ROLE_DECODE, dtype) for dtype in ("float8_e4m3fn", "bfloat16"))
    said = "prefill-0 gets no prompt: no decode worker can read its KV (dtype bfloat16 against float8_e4m3fn)"
    assert said in shown(prefill, other)
    assert "gets no prompt" not in shown(prefill, other, reader)


def test_the_balance_of_experts_is_shown_where_they_move() -> None:
    def shown(load: workers_pb2.WorkerLoad) -> str:
        worker = scheduler_pb2.WorkerStatus(identity=workers_pb2.WorkerIdentity(worker_id="decode-0"), load=load)
        text = StringIO()
        Console(width=80, file=text).print(tables(scheduler_pb2.WatchWorkersResponse(workers=[worker])))
        return text.getvalue()

    rows = [
        line.split() for line in shown(workers_pb2.WorkerLoad(expert_imbalance=0.125, experts_moved=19)).splitlines()
    ]
    assert ["decode-0", "12%", "above", "the", "mean", "19"] in rows
    # An even load is a figure, too.
    assert "0% above the mean" in shown(workers_pb2.WorkerLoad(expert_imbalance=0.0))
    assert "experts" not in shown(workers_pb2.WorkerLoad())
