-- Register a worker, or keep it registered. Sweeps remove silent workers.
-- KEYS[1] prefix
-- ARGV[1] worker id  [2] time to live in ms  [3] its description, as JSON  [4] and on: its models
-- Returns 1
-- @include spells
local MAX_TTL = 600000
local SERVED_TTL, MAX_SERVED = 86400000, 1000

-- For `why`: until when workers that know these words served a name, and the times in which none did. `alive:<name>`
-- has the former, as `<last heartbeat> <until>` by the words.
local MAX_KNOWN = 32 -- sets of words of one name
local ALIVE_TTL = 604800000
local knows = string.match(ARGV[3], '"knows":"([^"]*)"') or '1'
local function note_alive(name)
  local key = P .. 'alive:' .. name
  local seen, until_ms = string.match(redis.call('HGET', key, knows) or '', '^(%d+) (%d+)$')
  if not seen and redis.call('HLEN', key) >= MAX_KNOWN then
    return
  end
  if not seen or tonumber(until_ms) < NOW then
    note_spell(P .. 'spells:' .. knows .. ':' .. name, tonumber(seen or 0), NOW)
  end
  redis.call('HSET', key, knows, int(NOW) .. ' ' .. int(NOW + ARGV[2]))
  redis.call('PEXPIRE', key, ALIVE_TTL)
end

redis.call('HDEL', P .. 'meta', '') -- a removal, so that the later writes pass at maxmemory
redis.call('ZADD', P .. 'workers', int(NOW + ARGV[2]), ARGV[1])
redis.call('SET', P .. 'worker:' .. ARGV[1], ARGV[3], 'PX', ARGV[2])
for i = 4, #ARGV do
  local serves = P .. 'serves:' .. ARGV[i]
  redis.call('ZREMRANGEBYSCORE', serves, '-inf', int(NOW))
  -- Left there by a clock that was set back since: a live worker registers again.
  redis.call('ZREMRANGEBYSCORE', serves, int(NOW + MAX_TTL), '+inf')
  redis.call('ZADD', serves, int(NOW + ARGV[2]), ARGV[1])
  note_alive(ARGV[i])
  redis.call('PEXPIRE', serves, ARGV[2])
  if not string.find(ARGV[i], '~', 1, true) then
    redis.call('ZADD', P .. 'served', int(NOW), ARGV[i])
  end
end
-- Gateways read `served` to distinguish an unavailable model from an unknown one: see served.lua.
redis.call('ZREMRANGEBYSCORE', P .. 'served', '-inf', int(NOW - SERVED_TTL))
local over = redis.call('ZRANGE', P .. 'served', 0, -MAX_SERVED - 1)
if #over > 0 then
  redis.call('ZREM', P .. 'served', unpack(over))
end
redis.call('PEXPIRE', P .. 'served', SERVED_TTL)
return 1
