-- Claim due deliveries: webhooks to call, or ends for a relay. Those that are not settled become due again when the
-- claim lapses. The last delivery may exceed 1 MiB in total.
-- KEYS[1] prefix
-- ARGV[1] maximum number  [2] claim in ms  [3] the relay's name, or '' for webhooks
-- ARGV[4..] ids: only these, if they are still due
-- Returns names and values of each: receiver (URL or the relay's name), tries (so far, including this one), lane,
--   finished_at, end (as `end_record` returns it)
-- @include records
-- @include core/clock
local MAX_BYTES = 1048576
local box, field = P .. 'outbox', 'webhook'
if ARGV[3] ~= '' then
  box, field = box .. ':' .. ARGV[3], 'relay'
end
-- Maximum pause before another try.
local MAX_PAUSE = 7200000
bring_near(box, MAX_PAUSE, 0, 64)
local due = {}
for i = 4, #ARGV do
  local at = redis.call('ZSCORE', box, ARGV[i])
  if at and tonumber(at) <= NOW then
    due[#due + 1] = ARGV[i]
  end
end
if #ARGV < 4 then
  due = redis.call('ZRANGEBYSCORE', box, '-inf', int(NOW), 'LIMIT', 0, ARGV[1])
end
local notices, bytes = {}, 0
for _, id in ipairs(due) do
  if bytes > MAX_BYTES then
    break
  end
  local job = redis.call('HMGET', P .. 'job:' .. id, field, 'lane', 'finished_at')
  redis.call('ZREM', box, id)
  if job[1] and job[3] then
    redis.call('ZADD', box, int(NOW + ARGV[2]), id)
    local tries = redis.call('HINCRBY', P .. 'job:' .. id, field == 'relay' and 'relayed' or 'notified', 1)
    local record, size = end_record(id)
    notices[#notices + 1] = {
      'receiver', job[1], 'tries', tries, 'lane', job[2], 'finished_at', job[3], 'end', record
    }
    bytes = bytes + size
  end
end
return notices
