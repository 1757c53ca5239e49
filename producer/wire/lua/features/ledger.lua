-- Usage of ended jobs: a hash for each UTC day with a row for each tenant, model and API key (docs/usage.md). Ends are
-- added to the list `usage:new`, and moved from there into the rows in groups, and before each read. The rest is in a
-- block because a script can have at most 200 local names.
local fold_usage, write_usage, note_usage
do
  local NEW_USAGE = P .. 'usage:new'
  local USAGE_TTL = 34560000000 -- 400 days
  local MAX_NEW = 64
  local MANY = 8 -- ends of one call from which on writing the rows directly is cheaper

  -- Add a row to a day: its name and its sums. The first row starts the day, and removes the oldest days if there are
  -- too many days or rows. `*:*` collects everything after the day's maximum number of rows; no tenant has this name.
  local function open_row(day, key, row)
    local rows = redis.call('HLEN', key)
    if rows >= 4096 then
      return '*:*', redis.call('HGET', key, '*:*') or ''
    elseif rows > 0 then
      return row, ''
    end
    redis.call('ZREMRANGEBYSCORE', P .. 'usage', '-inf', day - USAGE_TTL / 86400000)
    redis.call('ZADD', P .. 'usage', day, day)
    redis.call('HSET', key, row, '')
    redis.call('PEXPIRE', key, USAGE_TTL)
    redis.call('PEXPIRE', P .. 'usage', USAGE_TTL)
    for _, other in ipairs(redis.call('ZREVRANGE', P .. 'usage', 0, -1)) do
      rows = rows + redis.call('HLEN', P .. 'usage:' .. other)
      if rows > 100000 then
        redis.call('ZREM', P .. 'usage', other)
        redis.call('UNLINK', P .. 'usage:' .. other)
      end
    end
    return row, ''
  end

  local function add_usage(entries)
    local added = {}
    for _, entry in ipairs(entries) do
      local day, input, cached, output, device, row = string.match(entry, '^(%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
      if day then
        local place = day .. ' ' .. row
        local sums = added[place] or {day, row, 0, 0, 0, 0, 0}
        added[place] = sums
        sums[3], sums[4], sums[5] = sums[3] + 1, sums[4] + input, sums[5] + cached
        sums[6], sums[7] = sums[6] + output, sums[7] + device
      end
    end
    for _, sums in pairs(added) do
      local key, row = P .. 'usage:' .. sums[1], sums[2]
      local before = redis.call('HGET', key, row)
      if not before then
        row, before = open_row(tonumber(sums[1]), key, row)
      end
      local a, b, c, d, e = string.match(before, '^(%d+) (%d+) (%d+) (%d+) (%d+)$')
      redis.call('HSET', key, row, string.format('%.0f %.0f %.0f %.0f %.0f', sums[3] + (a or 0), sums[4] + (b or 0),
        sums[5] + (c or 0), sums[6] + (d or 0), sums[7] + (e or 0)))
    end
  end

  function fold_usage()
    local entries = redis.call('LRANGE', NEW_USAGE, 0, -1)
    redis.call('UNLINK', NEW_USAGE)
    add_usage(entries)
  end

  -- Usage that is not in the list yet.
  local new_usage = {}
  function write_usage()
    if #new_usage == 0 then
      return
    elseif #new_usage >= MANY then
      add_usage(new_usage)
      new_usage = {}
      return
    end
    local length = redis.call('RPUSH', NEW_USAGE, unpack(new_usage))
    if length == #new_usage then
      redis.call('PEXPIRE', NEW_USAGE, USAGE_TTL)
    end
    if length >= MAX_NEW then
      fold_usage()
    end
    new_usage = {}
  end

  function note_usage(job)
    if job.uncounted then
      return
    end
    local row = string.match(job.lane, ':%w:([^~]*)') -- without the revision
    if job.api_key then
      row = row .. ' ' .. job.api_key
    end
    new_usage[#new_usage + 1] = math.floor(NOW / 86400000) .. ' ' .. used_by(job) .. ' ' .. row
    if not together then
      write_usage()
    end
  end
end

-- @hook on_end
on_end[#on_end + 1] = function(_, job)
  note_usage(job)
end
on_flush[#on_flush + 1] = write_usage
