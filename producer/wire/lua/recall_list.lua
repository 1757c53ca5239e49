-- List workers that deviate or disagree, or the jobs that one of them committed since its last clean canary.
-- KEYS[1] prefix
-- ARGV[1] worker, or '' for all  [2] maximum number of jobs
-- Returns {{worker, {name, value...}, number of jobs}...}, up to 200, the latest first; or for one worker {ids}
-- @include trails
local MAX_WORKERS = 200
if ARGV[1] ~= '' then
  local ids = {}
  for i, entry in ipairs(redis.call('LRANGE', P .. 'did:' .. ARGV[1], 0, ARGV[2] - 1)) do
    ids[i] = trails.read(entry)
  end
  return {ids}
end
local replies = {}
for i, worker in ipairs(redis.call('ZREVRANGE', P .. 'accused', 0, MAX_WORKERS - 1)) do
  replies[i] = {worker, redis.call('HGETALL', P .. 'audit:' .. worker), redis.call('LLEN', P .. 'did:' .. worker)}
end
return replies
