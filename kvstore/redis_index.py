"""The index that several stores share, in Redis or Valkey; it holds keys of blocks, and never their bytes.

Layout: the hash `deepmesh:{kv}` has a field for each store, "<end of its lease, ms>:<epoch>"; the set
`deepmesh:{kv}:<store>:<epoch>` has the keys of its blocks, and expires with the lease. So nobody reads what a store
lost with an earlier epoch, and what it does not renew disappears. The hash tag keeps all keys in one slot.
"""

from collections.abc import Iterator, Sequence

from kvstore.config import IndexConfig
from kvstore.index import Location
from kvstore.keys import Key
from mesh.errors import IndexUnavailable, LeaseConflict
from mesh.metrics import KVSTORE_INDEX_FAILURES
from mesh.redis_link import RedisLink

STORES = "deepmesh:{kv}"
# Keys in one command: few enough that other clients do not wait for it.
PAGE_KEYS = 1000

_NOW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function lease_of(entry)
  local ends, epoch = string.match(entry, '^(%d+):(.*)$')
  -- What is no lease has ended: one wrong entry must not keep all stores from the index.
  return tonumber(ends) or 0, epoch or ''
end
"""

# KEYS: the stores. ARGV: keys of a chain. Returns blocks, store, epoch.
_MATCH = (
    _NOW
    + """
local best, best_store, best_epoch = 0, '', ''
local stores = redis.call('HGETALL', KEYS[1])
for i = 1, #stores, 2 do
  local ends, epoch = lease_of(stores[i + 1])
  if ends > now then
    local held = KEYS[1] .. ':' .. stores[i] .. ':' .. epoch
    local count, complete = 0, true
    while complete and count < #ARGV do
      local found = redis.pcall('SMISMEMBER', held, unpack(ARGV, count + 1, math.min(count + 256, #ARGV)))
      if found.err then break end
      for _, present in ipairs(found) do
        if present == 0 then complete = false break end
        count = count + 1
      end
    end
    if count > best then best, best_store, best_epoch = count, stores[i], epoch end
  end
end
return {best, best_store, best_epoch}
"""
)

# KEYS: the stores. ARGV: store, epoch, lease in ms, whether to take the id from another epoch. Returns how many blocks
# are believed; -1 where another epoch has a live lease. Forgets stores whose lease ended.
_RENEW = (
    _NOW
    + """
local stores = redis.call('HGETALL', KEYS[1])
for i = 1, #stores, 2 do
  local ends, epoch = lease_of(stores[i + 1])
  local live = ends > now
  if stores[i] == ARGV[1] and epoch ~= ARGV[2] then
    if live and ARGV[4] == '0' then return -1 end
    redis.call('UNLINK', KEYS[1] .. ':' .. stores[i] .. ':' .. epoch)
  elseif not live then
    redis.call('HDEL', KEYS[1], stores[i])
  end
end
local held = KEYS[1] .. ':' .. ARGV[1] .. ':' .. ARGV[2]
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f:%s', now + ARGV[3], ARGV[2]))
redis.call('PEXPIRE', held, ARGV[3])
return redis.call('SCARD', held)
"""
)

# KEYS: the stores. ARGV: store, epoch. Ends the lease of that epoch, not of a later one.
_LEAVE = (
    _NOW
    + """
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry then
  local _, epoch = lease_of(entry)
  if epoch == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
end
return redis.call('UNLINK', KEYS[1] .. ':' .. ARGV[1] .. ':' .. ARGV[2])
"""
)


class RedisIndex:
    """Each call is one round trip: one EVALSHA, or one pipeline for each thousand keys. None waits for long."""

    def __init__(self, config: IndexConfig, store_id: str, epoch: str) -> None:
        """Raises ConfigError if its URL is none of Redis."""
        self._store_id = store_id
        self._epoch = epoch
        self._lease_ms = int(config.lease_seconds * 1000)
        self._link = RedisLink(config, "the index", IndexUnavailable, KVSTORE_INDEX_FAILURES)
        self._redis = self._link.client
        self._match, self._renew, self._leave = map(self._redis.register_script, (_MATCH, _RENEW, _LEAVE))
        self._held = f"{STORES}:{store_id}:{epoch}"
        # The first renewal takes the id from whatever process had it before; later ones only if it is free.
        self._takes_over = True

    async def match(self, keys: Sequence[Key]) -> Location | None:
        try:
            blocks, store_id, epoch = await self._link.ask(self._match, keys=[STORES], args=keys)
        except IndexUnavailable:
            return None
        if not blocks:
            return None
        return Location(store_id.decode(errors="replace"), epoch.decode(errors="replace"), blocks)

    async def renew(self) -> int:
        arguments = [self._store_id, self._epoch, self._lease_ms, int(self._takes_over)]
        believed: int = await self._link.ask(self._renew, keys=[STORES], args=arguments)
        if believed < 0:
            raise LeaseConflict(f"another process runs as KV store {self._store_id!r}: give each its own store_id")
        self._takes_over = False
        return believed

    async def add(self, keys: Sequence[Key]) -> None:
        for page in _pages(keys):
            await self._link.ask(self._add_page, page)

    async def remove(self, keys: Sequence[Key]) -> None:
        for page in _pages(keys):
            await self._link.ask(self._redis.srem, self._held, *page)

    async def clear(self) -> None:
        await self._link.ask(self._redis.unlink, self._held)

    async def close(self) -> None:
        try:
            await self._link.ask(self._leave, keys=[STORES], args=[self._store_id, self._epoch])
        finally:
            await self._link.close()

    async def _add_page(self, page: Sequence[Key]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.sadd(self._held, *page)
            # The set may be new, and must never outlive its lease.
            pipeline.pexpire(self._held, self._lease_ms)
            await pipeline.execute()


def _pages(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    for start in range(0, len(keys), PAGE_KEYS):
        yield keys[start : start + PAGE_KEYS]
