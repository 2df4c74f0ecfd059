"""The index that several stores share, in Redis or Valkey. It holds keys of blocks, never their bytes.

Layout: the hash `deepmesh:{kv}` has a field for each store, "<end of its lease, ms>:<epoch>"; the set
`deepmesh:{kv}:<store>:<epoch>` has the keys of its blocks, and expires with the lease. So no store reads what another
lost with an earlier epoch, and what it does not renew disappears. The hash tag keeps all keys in one slot.

A renewal returns the stores that have a lease, so a lookup asks only for their sets: a set disappears when its lease
ends. A store that came after the last renewal is not asked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.config import IndexConfig
from kvstore.index import Location
from kvstore.keys import Key
from mesh.errors import IndexUnavailable, LeaseConflict
from mesh.observe.metrics import KVSTORE_INDEX_FAILURES
from mesh.redis.commands import Script
from mesh.redis.link import RedisLink

STORES = b"deepmesh:{kv}"
# Keys in one command; few enough that other clients need not wait for it.
PAGE_KEYS = 1000
# Blocks of a chain in one round trip. For a longer chain, the next round trip asks only the stores that had all blocks
# so far.
LOOKUP_KEYS = 512

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

# KEYS: the stores. ARGV: store, epoch, lease in ms, whether to take the id from another epoch. Returns how many blocks
# the index has for the store, or -1 if another epoch has a live lease; then the store and epoch of each other lease.
# Forgets stores whose lease has ended, and skips those whose set is not a set. It also runs the commands that lookups
# need, so that a user without the permission fails here, where it is logged once.
_RENEW = (
    _NOW
    + """
local held = KEYS[1] .. ':' .. ARGV[1] .. ':' .. ARGV[2]
call('SMISMEMBER', held, '')
local stores, answer = call('HGETALL', KEYS[1]), {0}
for i = 1, #stores, 2 do
  local ends, epoch = lease_of(stores[i + 1])
  local live = ends > now
  if stores[i] == ARGV[1] and epoch ~= ARGV[2] then
    if live and ARGV[4] == '0' then return {-1} end
    call('UNLINK', KEYS[1] .. ':' .. stores[i] .. ':' .. epoch)
  elseif not live then
    call('HDEL', KEYS[1], stores[i])
  elseif stores[i] ~= ARGV[1] then
    local held_there = redis.pcall('SCARD', KEYS[1] .. ':' .. stores[i] .. ':' .. epoch)
    if type(held_there) == 'number' then
      answer[#answer + 1] = stores[i]
      answer[#answer + 1] = epoch
    end
  end
end
call('HSET', KEYS[1], ARGV[1], string.format('%.0f:%s', now + ARGV[3], ARGV[2]))
call('PEXPIRE', held, ARGV[3])
answer[1] = call('SCARD', held)
return answer
"""
)

# KEYS: the stores. ARGV: store, epoch. Ends the lease of that epoch, but not that of a later one.
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


_RENEWAL, _DEPARTURE = map(Script, (_RENEW, _LEAVE))


@dataclass(frozen=True, slots=True)
class _Lease:
    """A store with a lease, and the name of the set with its keys."""

    store_id: str
    epoch: str
    held: bytes

    @classmethod
    def of(cls, store_id: bytes, epoch: bytes) -> "_Lease":
        held = b":".join((STORES, store_id, epoch))
        return cls(store_id.decode(errors="replace"), epoch.decode(errors="replace"), held)


class RedisIndex:
    """A lookup is one round trip for each 512 blocks: one SMISMEMBER for each store. A renewal is one EVALSHA; other
    calls are two commands for each thousand keys. No call waits longer than the timeout.
    """

    def __init__(self, config: IndexConfig, store_id: str, epoch: str) -> None:
        """Raises ConfigError if the Redis configuration is invalid."""
        self._store_id = store_id.encode()
        self._epoch = epoch.encode()
        self._lease_ms = _number(config.lease_seconds * 1000)
        self._link = RedisLink(config, "the index", IndexUnavailable, KVSTORE_INDEX_FAILURES)
        self._own = _Lease.of(self._store_id, self._epoch)
        # Leases of this store and the others, as of the last renewal.
        self._leases: list[_Lease] = []
        # The first renewal takes the id from whatever process had it before; later ones take it only if it is free.
        self._takes_over = True

    async def match(self, keys: Sequence[Key]) -> Location | None:
        longest, asked, leases = None, 0, self._leases
        try:
            while leases and asked < len(keys):
                page = keys[asked : asked + LOOKUP_KEYS]
                found = await self._found(leases, page)
                if most := max(found):
                    best = leases[found.index(most)]
                    longest = Location(best.store_id, best.epoch, asked + most)
                asked += len(page)
                leases = [lease for lease, blocks in zip(leases, found, strict=True) if blocks == len(page)]
        except IndexUnavailable:
            return None
        return longest

    async def renew(self) -> int:
        arguments = (self._store_id, self._epoch, self._lease_ms, _number(self._takes_over))
        believed, others = _renewed(await self._link.evaluate(_RENEWAL, STORES, *arguments))
        if believed < 0:
            name = self._store_id.decode()
            raise LeaseConflict(f"another process runs as KV store {name!r}: give each its own store_id")
        self._takes_over = False
        self._leases = [self._own, *others]
        return believed

    async def add(self, keys: Sequence[Key]) -> None:
        for page in _pages(keys):
            # Set the expiry with every write: the set may be new, and must never outlive its lease.
            await self._link.ask((b"SADD", self._own.held, *page), (b"PEXPIRE", self._own.held, self._lease_ms))

    async def remove(self, keys: Sequence[Key]) -> None:
        for page in _pages(keys):
            await self._link.ask((b"SREM", self._own.held, *page))

    async def clear(self) -> None:
        await self._link.ask((b"UNLINK", self._own.held))

    async def _found(self, leases: Sequence[_Lease], keys: Sequence[Key]) -> list[int]:
        """How many leading keys each store has."""
        answers = await self._link.ask(*((b"SMISMEMBER", lease.held, *keys) for lease in leases))
        return [_leading(answer, len(keys)) for answer in answers]

    async def close(self) -> None:
        try:
            await self._link.evaluate(_DEPARTURE, STORES, self._store_id, self._epoch)
        finally:
            await self._link.close()


def _leading(answer: object, keys: int) -> int:
    """How many leading keys a set has, by Redis' answer about `keys` keys. Raises IndexUnavailable if that is no valid
    answer to SMISMEMBER.
    """
    if not isinstance(answer, list) or len(answer) != keys or answer.count(0) + answer.count(1) != keys:
        raise _nonsense()
    return answer.index(0) if 0 in answer else keys


def _renewed(answer: object) -> tuple[int, list[_Lease]]:
    """The number of blocks in the index, and the other leases. Raises IndexUnavailable if it is no valid answer to a
    renewal.
    """
    if not isinstance(answer, list) or len(answer) % 2 == 0 or not isinstance(answer[0], int):
        raise _nonsense()
    believed, *names = answer
    if not all(isinstance(name, bytes) for name in names):
        raise _nonsense()
    return believed, list(map(_Lease.of, names[::2], names[1::2]))


def _nonsense() -> IndexUnavailable:
    KVSTORE_INDEX_FAILURES.inc()
    return IndexUnavailable("the index does not answer as Redis would: is it another server?")


def _number(value: float) -> bytes:
    return str(int(value)).encode()


def _pages(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    for start in range(0, len(keys), PAGE_KEYS):
        yield keys[start : start + PAGE_KEYS]
