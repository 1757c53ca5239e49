-- @include states
local KEPT = 128
local KEPT_TTL = 7 * DAY

-- A job with a promise has succeeded: its time over the estimate that the promise was made from, for those to come.
local function note_kept(job)
  local kind, from, estimate = string.match(job.promise, '^(%l+):(%d+):(%d+):')
  local _, _, _, model = split_lane(job.lane)
  local key = P .. 'kept:' .. kind .. ':' .. model
  redis.call('LPUSH', key, string.format('%.4f', math.max(0, NOW - from) / math.max(1, estimate)))
  redis.call('LTRIM', key, 0, KEPT - 1)
  redis.call('PEXPIRE', key, KEPT_TTL)
end
