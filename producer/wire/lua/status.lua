-- What jobs are doing.
-- KEYS[1] prefix
-- ARGV job ids
-- Returns per id an empty list (no such job) or {state, lane, attempt, crashes, created_at, started_at, finished_at,
--   deadline, worker, progress, progress_at, the equal job it follows or copied, the dead job it replays, position,
--   live workers for its model, last error, metadata, ids of jobs it still waits for, and if it names a revision that nobody
--   serves: those that are served}
-- @include states
-- @include records
-- @include revisions
local replies = {}
for i, id in ipairs(ARGV) do
  expire_if_late(id)
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'lane', 'attempt', 'crashes', 'at',
    'started_at', 'finished_at', 'deadline', 'worker', 'progress', 'progress_at', 'leader', 'replay_of', 'seq',
    'shared', 'waits', 'side')
  if not job[1] then
    replies[i] = {}
  else
    local waits_for, side = job[16], job[17]
    local _, _, _, model = split_lane(job[2])
    local waits = job[1] == 'queued' and not job[12]
    local failed = job[1] ~= 'succeeded' and outcome_of(id, job[15])
    job[14] = waits and redis.call('ZCOUNT', P .. 'wait:' .. waiting_lane(sides.sided_lane(job[2], side), job[4]), '-inf', '(' .. job[14])
    job[15] = redis.call('ZCOUNT', P .. 'serves:' .. model, int(NOW), '+inf')
    job[16] = failed ~= '' and failed
    job[17] = redis.call('GET', P .. 'md:' .. id)
    job[18] = waits_for
    job[19] = waits and job[15] == 0 and live_revisions(model)
    replies[i] = job
  end
end
return replies
