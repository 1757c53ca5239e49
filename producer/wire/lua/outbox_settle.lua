-- Settle a delivery that was made or given up, or schedule another try.
-- KEYS[1] prefix
-- ARGV[1] id  [2] the number of the try  [3] ms until the next one, or -1 for none
-- ARGV[4] the relay's name, or '' for webhooks  [5] the outcome of a webhook's try, for the job's history
-- Returns 1, or 0 if another process has claimed it since (nothing changed)
-- @include core/states
local MAX_OUTCOME = 300
local id = ARGV[1]
local box, count = P .. 'outbox', 'notified'
if ARGV[4] ~= '' then
  box, count = box .. ':' .. ARGV[4], 'relayed'
end
local tries = redis.call('HGET', P .. 'job:' .. id, count)
if tries and tries ~= ARGV[2] then
  return 0
end
redis.call('ZREM', box, id)
if tries and ARGV[4] == '' then
  redis.call('HSET', P .. 'job:' .. id, 'notice', string.sub(ARGV[5] or '', 1, MAX_OUTCOME))
end
if tries and tonumber(ARGV[3]) >= 0 then
  redis.call('ZADD', box, int(NOW + ARGV[3]), id)
elseif tries and not owes_notice(id) then
  local job = redis.call('HMGET', P .. 'job:' .. id, 'acked', 'batch', 'state', 'finished_at')
  if job[1] then
    erase(id)
  elseif not job[2] then
    expire_record(id, math.max(1, record_ttl(job[3]) + job[4] - NOW))
  end
end
return 1
