-- What was promised of a job's end (docs/queues.md), and how promises were kept. A header's `promise` is
-- `<now or later>:<from>:<estimate>:<p50>:<p90>`, unix ms and ms from then.
-- @hook on_submit
LONGEST.promise = 80
keep_fields('promise')
on_check[#on_check + 1] = function(job)
  return not job.promise or string.match(job.promise, '^%l+:%d+:%d+:%d+:%d+$')
end

-- @hook on_pull
given[#given + 1] = 'promise'

-- @hook on_end
do
  local KEPT = 128
  local KEPT_TTL = 7 * DAY

  -- A job with a promise has succeeded: its time over the estimate that the promise was made from, for those to come.
  on_end[#on_end + 1] = function(_, job, state)
    if not job.promise or state ~= 'succeeded' or job.state ~= 'running' then
      return
    end
    local kind, from, estimate = string.match(job.promise, '^(%l+):(%d+):(%d+):')
    local _, _, _, model = split_lane(job.lane)
    local key = P .. 'kept:' .. kind .. ':' .. model
    redis.call('LPUSH', key, string.format('%.4f', math.max(0, NOW - from) / math.max(1, estimate)))
    redis.call('LTRIM', key, 0, KEPT - 1)
    redis.call('PEXPIRE', key, KEPT_TTL)
  end
end
