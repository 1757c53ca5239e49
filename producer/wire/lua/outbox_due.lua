-- Read deliveries that are due, without a claim, and postpone some that an earlier call returned.
-- KEYS[1] prefix
-- ARGV[1] maximum number  [2] the relay's name, or '' for webhooks
-- ARGV[3..] id and ms of each that is postponed, unless it was claimed since
-- Returns names and values: due, total (in the outbox), expired (entries whose record no longer exists; they are
--   removed), first ({id, URL or lane} each)
-- @include core/clock
-- Maximum pause before another try.
local MAX_PAUSE = 7200000
local box, field = P .. 'outbox', 'webhook'
if ARGV[2] ~= '' then
  box, field = box .. ':' .. ARGV[2], 'lane'
end
bring_near(box, MAX_PAUSE, 0, 64)
for i = 3, #ARGV, 2 do
  local due = redis.call('ZSCORE', box, ARGV[i])
  if due and tonumber(due) <= NOW then
    -- The removal comes first, so that the write passes at maxmemory.
    redis.call('ZREM', box, ARGV[i])
    redis.call('ZADD', box, int(NOW + math.min(MAX_PAUSE, ARGV[i + 1])), ARGV[i])
  end
end
local found, expired = {}, 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', box, '-inf', int(NOW), 'LIMIT', 0, ARGV[1])) do
  local receiver = redis.call('HGET', P .. 'job:' .. id, field)
  if receiver then
    found[#found + 1] = {id, receiver}
  else
    redis.call('ZREM', box, id)
    expired = expired + 1
  end
end
return {
  'due', redis.call('ZCOUNT', box, '-inf', int(NOW)), 'total', redis.call('ZCARD', box), 'expired', expired, 'first', found
}
