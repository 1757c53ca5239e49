-- Free results that a reader has stored elsewhere. The ids stay known, so submitting them again adds nothing.
-- KEYS[1] prefix
-- ARGV[1] batch id  [2] 'e' (order of ends) or 's' (order of submission)  [3] position up to which to free
-- ARGV[4] maximum number of jobs  [5] position to start from (order of submission only)
-- Returns {jobs freed, position reached}
-- @include core/states
local batch, limit = ARGV[1], tonumber(ARGV[4])
local ids, reached
if ARGV[2] == 'e' then
  local base = tonumber(redis.call('HGET', P .. 'batch:' .. batch, 'base') or 0)
  local wanted = math.min(limit, tonumber(ARGV[3]) - base)
  ids = wanted > 0 and redis.call('LRANGE', P .. 'bfeed:' .. batch, 0, wanted - 1) or {}
  reached = base + #ids
  if #ids > 0 then
    redis.call('LTRIM', P .. 'bfeed:' .. batch, #ids, -1)
    redis.call('HSET', P .. 'batch:' .. batch, 'base', int(reached))
  end
else
  local from = tonumber(ARGV[5])
  local wanted = math.min(limit, tonumber(ARGV[3]) - from)
  ids = wanted > 0 and redis.call('LRANGE', P .. 'bjobs:' .. batch, from, from + wanted - 1) or {}
  reached = from + #ids
end
local freed = 0
for _, id in ipairs(ids) do
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'acked')
  if job[1] and not ACTIVE[job[1]] and not job[2] then
    forget(id)
    redis.call('SADD', P .. 'backed:' .. batch, id)
    freed = freed + 1
  end
end
return {freed, reached}
