-- Return the status of jobs.
-- KEYS[1] prefix
-- ARGV job ids
-- Returns per id, up to a total of 1 MiB, an empty list (unknown job) or names and values of its fields, and of:
--   position (jobs before it in its lane), live_workers (for its model), error (the first 4 KiB of the last one),
--   metadata, waits (ids of jobs it still waits for), revisions (the served ones, if it names one that is not), unmet
--   (1 if none of its live workers knows all that it needs), held (`quota` or `running`: its tenant has used up a
--   quota, or its limit of running jobs)
-- @include core/states
-- @include records
-- @include revisions
-- @include features/quotas
local MAX_BYTES = 1048576
local MAX_ERROR = 4096
local FIELDS = {'state', 'lane', 'attempt', 'crashes', 'at', 'started_at', 'finished_at', 'deadline', 'worker', 'progress',
  'progress_at', 'leader', 'replay_of', 'waits'}
local NAMES = {unpack(FIELDS)}
for _, name in ipairs({'position', 'live_workers', 'error', 'metadata', 'revisions', 'unmet', 'held'}) do
  NAMES[#NAMES + 1] = name
end
local quotas = has_quotas() and new_quotas()

-- The limit that holds up a waiting job of a tenant, or nil.
local function holder_of(tenant, lane)
  return quotas.is_full(tenant) and 'running' or redis.call('SISMEMBER', P .. 'parked:' .. tenant, lane) == 1 and 'quota'
end

local replies, bytes = {}, 0
for i, id in ipairs(ARGV) do
  if bytes >= MAX_BYTES then
    break
  end
  expire_if_late(id)
  local job = redis.call('HMGET', P .. 'job:' .. id, 'seq', 'shared', unpack(FIELDS))
  local rank, shared = table.remove(job, 1), table.remove(job, 1)
  if not job[1] then
    replies[i] = {}
  else
    local state, lane = job[1], job[2]
    local _, _, tenant, model = split_lane(lane)
    local waits = state == 'queued' and not job[12]
    local failed = state ~= 'succeeded'
      and redis.call('GETRANGE', P .. (shared and 'end:' .. shared or 'out:' .. id), 0, MAX_ERROR - 1)
    job[15] = waits and redis.call('ZCOUNT', P .. 'wait:' .. waiting_lane(lane, job[4]), '-inf', '(' .. rank)
    job[16] = redis.call('ZCOUNT', P .. 'serves:' .. model, int(NOW), '+inf')
    job[17] = failed ~= '' and failed
    job[18] = redis.call('GET', P .. 'md:' .. id)
    job[19] = waits and job[16] == 0 and live_revisions(model)
    job[20] = waits and job[16] > 0 and is_unmet(lane) and 1
    job[21] = waits and quotas and holder_of(tenant, waiting_lane(lane, job[4]))
    bytes = bytes + #(job[17] or '') + #(job[18] or '')
    replies[i] = named(NAMES, job)
  end
end
return replies
