-- @include common
-- @include charging
-- What ended jobs took, a hash for each UTC day and a row in it for each tenant, model and API key (docs/usage.md).
local MAX_DAY_ROWS = 4096
-- Stands for all that the day has no more rows for; no tenant has this name.
local OTHER_ROWS = '*:*'

-- A row that the day does not have: its name and its sums. With the first row the day begins, and the oldest days are
-- dropped where they are too many, or have too many rows.
local function open_row(today, key, row)
  local rows = redis.call('HLEN', key)
  if rows >= MAX_DAY_ROWS then
    return OTHER_ROWS, redis.call('HGET', key, OTHER_ROWS) or ''
  elseif rows > 0 then
    return row, ''
  end
  local MAX_ROWS, MAX_DAYS = 100000, 400
  redis.call('ZREMRANGEBYSCORE', P .. 'usage', '-inf', today - MAX_DAYS)
  redis.call('ZADD', P .. 'usage', today, today)
  redis.call('HSET', key, row, '')
  redis.call('PEXPIRE', key, MAX_DAYS * 86400000)
  redis.call('PEXPIRE', P .. 'usage', MAX_DAYS * 86400000)
  for _, day in ipairs(redis.call('ZREVRANGE', P .. 'usage', 0, -1)) do
    rows = rows + redis.call('HLEN', P .. 'usage:' .. day)
    if rows > MAX_ROWS then
      redis.call('ZREM', P .. 'usage', day)
      redis.call('UNLINK', P .. 'usage:' .. day)
    end
  end
  return row, ''
end

-- A job ends: what its last execution took, as its worker says in the commit (`job.used`); of an end that no worker
-- writes, what its status shows. A follower took nothing: its leader did.
local function note_usage(job)
  local input, cached, output, device = 0, 0, 0, 0
  if job.leader then
    input = 0
  elseif job.used and #job.used <= 64 and string.find(job.used, '^%d+ %d+ %d+ %d+$') then
    input, cached, output, device = string.match(job.used, '(%d+) (%d+) (%d+) (%d+)')
  elseif job.progress then
    input, output = string.match(job.progress, '^%a+ (%d+) %d+ (%d+)')
  end
  local today = math.floor(NOW / 86400000)
  local key, row = P .. 'usage:' .. today, string.match(job.lane, ':%w:(.*)')
  if job.api_key then
    row = row .. ' ' .. job.api_key
  end
  local sums = redis.call('HGET', key, row)
  if not sums then
    row, sums = open_row(today, key, row)
  end
  local a, b, c, d, e = string.match(sums, '^(%d+) (%d+) (%d+) (%d+) (%d+)$')
  redis.call('HSET', key, row, string.format('%.0f %.0f %.0f %.0f %.0f', 1 + (a or 0), (input or 0) + (b or 0),
    cached + (c or 0), (output or 0) + (d or 0), device + (e or 0)))
  if job.charged then
    charging().settle(job, (input or 0) + (output or 0))
  end
end
