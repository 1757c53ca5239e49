-- @include common
-- @include charging
-- What ended jobs took, a hash for each UTC day and a row in it for each tenant, model and API key (docs/usage.md).
local note_usage
do
  local DAY_MS = 86400000
  local MAX_DAY_ROWS = 4096
  local MAX_ROWS = 100000
  local MAX_DAYS = 400
  local MAX_USED = 64 -- bytes of what a worker says
  -- Stands for all that the day has no more rows for; no tenant has this name.
  local OVERFLOW = '*:*'

  local function today()
    return math.floor(NOW / DAY_MS)
  end

  -- A day begins: the oldest are dropped where they are too many, or have too many rows.
  local function open_day(day)
    redis.call('ZADD', P .. 'usage', day, day)
    redis.call('PEXPIRE', P .. 'usage', MAX_DAYS * DAY_MS)
    local rows = 0
    for _, other in ipairs(redis.call('ZREVRANGE', P .. 'usage', 0, -1)) do
      rows = rows + redis.call('HLEN', P .. 'usage:' .. other)
      if rows > MAX_ROWS or tonumber(other) <= day - MAX_DAYS then
        redis.call('ZREM', P .. 'usage', other)
        redis.call('UNLINK', P .. 'usage:' .. other)
      end
    end
  end

  local function add_row(day, row, jobs, input, cached, output, device)
    local key = P .. 'usage:' .. day
    local found = redis.call('HGET', key, row)
    local is_first = false
    if not found then
      local rows = redis.call('HLEN', key)
      is_first = rows == 0
      if rows >= MAX_DAY_ROWS then
        row = OVERFLOW
        found = redis.call('HGET', key, row)
      end
    end
    local a, b, c, d, e = string.match(found or '', '^(%d+) (%d+) (%d+) (%d+) (%d+)$')
    redis.call('HSET', key, row, string.format('%.0f %.0f %.0f %.0f %.0f',
      jobs + (a or 0), input + (b or 0), cached + (c or 0), output + (d or 0), device + (e or 0)))
    if is_first then
      redis.call('PEXPIRE', key, MAX_DAYS * DAY_MS)
      open_day(day)
    end
  end

  -- A job ends: what its last execution took, as its worker says in the commit (`job.used`); of an end that no worker
  -- writes, what its status shows. A follower took nothing: its leader did.
  note_usage = function(job)
    local input, cached, output, device
    if job.used and #job.used <= MAX_USED and not job.leader then
      input, cached, output, device = string.match(job.used, '^(%d+) (%d+) (%d+) (%d+)$')
    end
    if not input and job.progress and not job.leader then
      input, output = string.match(job.progress, '^%a+ (%d+) %d+ (%d+)')
    end
    local row = string.match(job.lane, ':%w:(.*)')
    if job.api_key then
      row = row .. ' ' .. job.api_key
    end
    add_row(today(), row, 1, input or 0, cached or 0, output or 0, device or 0)
    if job.charged then
      quotas.settle(job, (input or 0) + (output or 0))
    end
  end
end
