-- What jobs are doing.
-- KEYS[1] prefix
-- ARGV job ids
-- Returns per id an empty list (no such job) or {state, lane, attempt, crashes, created_at, started_at, finished_at,
--   deadline, worker, progress, progress_at, position, live workers for its model, last error, metadata}
-- @include common
local replies = {}
for i, id in ipairs(ARGV) do
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'lane', 'attempt', 'crashes', 'created_at',
    'started_at', 'finished_at', 'deadline', 'worker', 'progress', 'progress_at')
  if not job[1] then
    replies[i] = {}
  else
    local _, _, _, model = split_lane(job[2])
    if job[1] == 'queued' then
      job[12] = redis.call('ZRANK', P .. 'wait:' .. waiting_lane(job[2], job[4]), id)
    else
      job[12] = false
    end
    job[13] = redis.call('ZCOUNT', P .. 'serves:' .. model, int(NOW), '+inf')
    job[14] = job[1] ~= 'succeeded' and redis.call('GET', P .. 'out:' .. id)
    job[15] = redis.call('GET', P .. 'md:' .. id)
    replies[i] = job
  end
end
return replies
