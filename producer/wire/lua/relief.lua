-- @include memory
-- Under pressure, large results that nobody is known to wait for live for ten minutes, the largest first.
local RESULT_TTL = 600000
local MAX_LOOKED = 256
local MAX_FREED = 64
local MAX_LARGE = 10000

local function may_expire(job)
  return not job[1] or (job[1] == 'succeeded' and NOW - tonumber(job[2] or NOW) >= RESULT_TTL)
end

-- Records expire by themselves: some of the entries that they leave behind go with each sweep.
local function forget_expired(count)
  local first = NOW % count
  for _, id in ipairs(redis.call('ZRANGE', P .. 'large', first, first + 15)) do
    if redis.call('EXISTS', P .. 'out:' .. id) == 0 then
      redis.call('ZREM', P .. 'large', id)
    end
  end
  if count > MAX_LARGE then
    redis.call('ZREM', P .. 'large', unpack(redis.call('ZRANGE', P .. 'large', 0, math.min(count - MAX_LARGE, 64) - 1)))
  end
end

-- Who submits the work again is to get a result.
local function free_key(id, idem)
  if idem and redis.call('GET', P .. 'idem:' .. idem) == id then
    redis.call('UNLINK', P .. 'idem:' .. idem)
  end
end

-- Returns 0 with room, 1 near the limit, 2 where submits are refused; and how many results were removed.
local function relieve()
  local share = tonumber(redis.call('HGET', P .. 'meta', 'memory_share') or MEMORY_SHARE)
  local count = redis.call('ZCARD', P .. 'large')
  if count > 0 then
    forget_expired(count)
  end
  local memory = read_memory()
  local excess = memory and memory[1] - (share - MEMORY_WARNING) * memory[2] or 0
  if excess <= 0 then
    return {0, 0}
  end
  local level = memory[1] >= share * memory[2] and 2 or 1
  local freed = 0
  local found = redis.call('ZREVRANGE', P .. 'large', 0, MAX_LOOKED - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local id = found[i]
    if freed == MAX_FREED or excess <= 0 then
      break
    end
    local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'finished_at', 'idem')
    if may_expire(job) then
      redis.call('ZREM', P .. 'large', id)
      free_key(id, job[3])
      excess = excess - found[i + 1]
      freed = freed + redis.call('UNLINK', P .. 'out:' .. id)
    end
  end
  if freed > 0 then
    redis.call('HINCRBY', P .. 'meta', 'memory_expired', freed)
  end
  return {level, freed}
end
