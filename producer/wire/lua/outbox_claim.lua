-- Take webhook deliveries that are due. One that is not settled comes again when its claim lapses.
-- KEYS[1] prefix
-- ARGV[1] how many at most  [2] claim in ms
-- Returns {url, tries so far with this one, lane, finished_at, end record} each
-- @include records
local notices = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'outbox', '-inf', int(NOW), 'LIMIT', 0, ARGV[1])) do
  local job = redis.call('HMGET', P .. 'job:' .. id, 'webhook', 'lane', 'finished_at')
  redis.call('ZREM', P .. 'outbox', id)
  if job[1] and job[3] then
    redis.call('ZADD', P .. 'outbox', int(NOW + ARGV[2]), id)
    local tries = redis.call('HINCRBY', P .. 'job:' .. id, 'notified', 1)
    notices[#notices + 1] = {job[1], tries, job[2], job[3], end_record(id)}
  end
end
return notices
