-- Estimates of a job's end (docs/queues.md), and their accuracy. A header's `estimate` is
-- `<now or later>:<from>:<estimate>:<p50>:<p90>`, in unix ms and ms from then.
-- @hook on_submit
LONGEST.estimate = 80
keep_fields('estimate')
on_check[#on_check + 1] = function(job)
  return not job.estimate or string.match(job.estimate, '^%l+:%d+:%d+:%d+:%d+$')
end

-- @hook on_pull
given[#given + 1] = 'estimate'

-- @hook on_end
do
  local KEPT = 128
  local KEPT_TTL = 7 * DAY

  -- When a job with an estimate succeeds, record the ratio of its time to the estimate for later estimates.
  on_end[#on_end + 1] = function(_, job, state)
    if not job.estimate or state ~= 'succeeded' or job.state ~= 'running' then
      return
    end
    local kind, from, estimate = string.match(job.estimate, '^(%l+):(%d+):(%d+):')
    local _, _, _, model = split_lane(job.lane)
    local key = P .. 'kept:' .. kind .. ':' .. model
    redis.call('LPUSH', key, string.format('%.4f', math.max(0, NOW - from) / math.max(1, estimate)))
    redis.call('LTRIM', key, 0, KEPT - 1)
    redis.call('PEXPIRE', key, KEPT_TTL)
  end
end
