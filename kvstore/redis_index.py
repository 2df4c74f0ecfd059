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
from mesh.redis_link import RedisLink, Script

STORES = b"deepmesh:{kv}"
# Keys in one command: few enough that other clients do not wait for it.
PAGE_KEYS = 1000

_NOW = """
local function call(command, ...)
  local answer = redis.pcall(command, ...)
  -- Redis does not say which command of a script its user may not run.
  if type(answer) == 'table' and answer.err then error(command .. ': ' .. answer.err, 0) end
  return answer
end
local clock = call('TIME')
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
local stores = call('HGETALL', KEYS[1])
for i = 1, #stores, 2 do
  local ends, epoch = lease_of(stores[i + 1])
  if ends > now then
    local held = KEYS[1] .. ':' .. stores[i] .. ':' .. epoch
    local count, complete = 0, true
    while complete and count < #ARGV do
      local found = redis.pcall('SMISMEMBER', held, unpack(ARGV, count + 1, math.min(count + 256, #ARGV)))
      if found.err then
        if not string.find(found.err, 'WRONGTYPE') then error('SMISMEMBER: ' .. found.err, 0) end
        break
      end
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
# are believed; -1 where another epoch has a live lease. Forgets stores whose lease ended. It also runs what lookups
# need, so that a user who may not look up is told here, where it is logged once.
_RENEW = (
    _NOW
    + """
local held = KEYS[1] .. ':' .. ARGV[1] .. ':' .. ARGV[2]
call('SMISMEMBER', held, '')
local stores = call('HGETALL', KEYS[1])
for i = 1, #stores, 2 do
  local ends, epoch = lease_of(stores[i + 1])
  local live = ends > now
  if stores[i] == ARGV[1] and epoch ~= ARGV[2] then
    if live and ARGV[4] == '0' then return -1 end
    call('UNLINK', KEYS[1] .. ':' .. stores[i] .. ':' .. epoch)
  elseif not live then
    call('HDEL', KEYS[1], stores[i])
  end
end
call('HSET', KEYS[1], ARGV[1], string.format('%.0f:%s', now + ARGV[3], ARGV[2]))
call('PEXPIRE', held, ARGV[3])
return call('SCARD', held)
"""
)

# KEYS: the stores. ARGV: store, epoch. Ends the lease of that epoch, not of a later one.
_LEAVE = (
    _NOW
    + """
local entry = call('HGET', KEYS[1], ARGV[1])
if entry then
  local _, epoch = lease_of(entry)
  if epoch == ARGV[2] then call('HDEL', KEYS[1], ARGV[1]) end
end
return call('UNLINK', KEYS[1] .. ':' .. ARGV[1] .. ':' .. ARGV[2])
"""
)


LOOKUP, _RENEWAL, _DEPARTURE = map(Script, (_MATCH, _RENEW, _LEAVE))


class RedisIndex:
    """Each call is one round trip: one EVALSHA, or two commands for each thousand keys. None waits for long."""

    def __init__(self, config: IndexConfig, store_id: str, epoch: str) -> None:
        """Raises ConfigError if its Redis is none."""
        self._store_id = store_id.encode()
        self._epoch = epoch.encode()
        self._lease_ms = _number(config.lease_seconds * 1000)
        self._link = RedisLink(config, "the index", IndexUnavailable, KVSTORE_INDEX_FAILURES)
        self._held = b":".join((STORES, self._store_id, self._epoch))
        # The first renewal takes the id from whatever process had it before; later ones only if it is free.
        self._takes_over = True

    async def match(self, keys: Sequence[Key]) -> Location | None:
        try:
            return _location(await self._link.evaluate(LOOKUP, STORES, *keys), len(keys))
        except IndexUnavailable:
            return None

    async def renew(self) -> int:
        arguments = (self._store_id, self._epoch, self._lease_ms, _number(self._takes_over))
        believed = await self._link.evaluate(_RENEWAL, STORES, *arguments)
        if type(believed) is not int:
            raise _nonsense()
        if believed < 0:
            name = self._store_id.decode()
            raise LeaseConflict(f"another process runs as KV store {name!r}: give each its own store_id")
        self._takes_over = False
        return believed

    async def add(self, keys: Sequence[Key]) -> None:
        for page in _pages(keys):
            # The set may be new, and must never outlive its lease.
            await self._link.ask((b"SADD", self._held, *page), (b"PEXPIRE", self._held, self._lease_ms))

    async def remove(self, keys: Sequence[Key]) -> None:
        for page in _pages(keys):
            await self._link.ask((b"SREM", self._held, *page))

    async def clear(self) -> None:
        await self._link.ask((b"UNLINK", self._held))

    async def close(self) -> None:
        try:
            await self._link.evaluate(_DEPARTURE, STORES, self._store_id, self._epoch)
        finally:
            self._link.close()


def _location(answer: object, most_blocks: int) -> Location | None:
    """What a lookup found. Raises IndexUnavailable for what no lookup of ours answers."""
    match answer:
        case [0, bytes(), bytes()]:
            return None
        case [int(blocks), bytes(store_id), bytes(epoch)] if 0 < blocks <= most_blocks:
            return Location(store_id.decode(errors="replace"), epoch.decode(errors="replace"), blocks)
    raise _nonsense()


def _nonsense() -> IndexUnavailable:
    KVSTORE_INDEX_FAILURES.inc()
    return IndexUnavailable("the index does not answer as Redis would: is it another server?")


def _number(value: float) -> bytes:
    return str(int(value)).encode()


def _pages(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    for start in range(0, len(keys), PAGE_KEYS):
        yield keys[start : start + PAGE_KEYS]
