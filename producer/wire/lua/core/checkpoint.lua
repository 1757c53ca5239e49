-- Append the generated tokens of jobs and update their progress. Fenced, append-only, and atomic per job.
-- KEYS[1] prefix
-- ARGV per job the number of arguments that follow, and [1] id  [2] token
--   [3] progress `<phase> <prompt done> <prompt> <generated> <max> <blocks>`  [4] fingerprint or ''
--   [5] 1: drop the checkpoint first; then per delta: sample index, offset, number of tokens, entry
-- Returns per job ok | cancelled (written, but stop the job) | stale | bad_offset (nothing written)
-- @include core/each
-- Streaming jobs with new tokens.
local told = {}

-- The same call may arrive twice if its first reply was lost. Its entries are then already the last ones. They are read
-- only if no sample lacks tokens of the call.
local function is_replay(args, feed, lengths)
  for i = 6, #args, 4 do
    if lengths[args[i]] < args[i + 1] + args[i + 2] then
      return false
    end
  end
  local entries = (#args - 5) / 4
  local last = entries > 0 and redis.call('LRANGE', feed, -entries, -1)
  for i = 1, entries do
    if last[i] ~= args[5 + 4 * i] then
      return false
    end
  end
  return entries > 0
end

-- Append to one job, as its arguments specify.
local function checkpoint(args)
  local id, restart = args[1], args[5] == '1'
  local key, feed = P .. 'job:' .. id, P .. 'ckpt:' .. id
  local names = {'state', 'token', 'ending', 'stream', 'n', 'saved', 'crashes', 'width'}
  for i = 6, #args, 4 do
    names[#names + 1] = 'len:' .. args[i]
  end
  local job = redis.call('HMGET', key, unpack(names))
  if job[1] ~= 'running' or job[2] ~= args[2] then
    return 'stale'
  end

  local lengths, samples = {}, tonumber(job[8] or job[5] or 1)
  for i = 6, #args, 4 do
    lengths[args[i]] = tonumber(job[8 + (i - 2) / 4] or 0)
  end
  local replay = is_replay(args, feed, lengths)
  local entries, grown, saved = {}, 0, not restart and tonumber(job[6] or 0) or 0
  if not replay then
    for i = 6, restart and #args or 0, 4 do
      lengths[args[i]] = 0
    end
    for i = 6, #args, 4 do
      local index, tokens = args[i], tonumber(args[i + 2])
      if tonumber(args[i + 1]) ~= lengths[index] or tonumber(index) >= samples then
        return 'bad_offset'
      end
      lengths[index] = lengths[index] + tokens
      grown = grown + tokens
      entries[#entries + 1] = args[i + 3]
      saved = saved + #args[i + 3]
    end
  end

  -- Removals first, so that the later writes pass at maxmemory.
  redis.call('HDEL', key, 'progress')
  if restart and not replay then
    for i = 0, samples - 1 do
      redis.call('HDEL', key, 'len:' .. i)
    end
    redis.call('UNLINK', feed)
    redis.call('HDEL', key, 'saved')
    redis.call('HINCRBY', key, 'epoch', 1)
  end
  local fields = {'progress', args[3], 'progress_at', int(NOW)}
  local function set(name, value)
    fields[#fields + 1], fields[#fields + 2] = name, value
  end
  if args[4] ~= '' then
    set('fingerprint', args[4])
  end
  if string.sub(args[3], 1, 7) ~= 'waiting' then
    set('stepped', 1)
  end
  if #entries > 0 then
    redis.call('RPUSH', feed, unpack(entries))
    set('saved', saved)
    for index, length in pairs(lengths) do
      set('len:' .. index, length)
    end
  end
  if grown > 0 then
    set('advanced', 1)
    if job[7] then
      redis.call('HDEL', key, 'crashes')
    end
  end
  redis.call('HSET', key, unpack(fields))
  if job[4] and #args > 5 then
    told[#told + 1] = id
  end
  return job[3] and 'cancelled' or 'ok'
end

-- Notify listeners. Listeners of a release that knows only `feed` get a message per job; they exist if that channel has
-- more subscribers than the other.
local function tell()
  local knows_many = #told > 1 and redis.call('PUBLISH', P .. 'feeds', table.concat(told, ' '))
  if knows_many and redis.call('PUBLISH', P .. 'feed', '') <= knows_many then
    return
  end
  for _, id in ipairs(told) do
    redis.call('PUBLISH', P .. 'feed', id)
  end
end

local replies = each(checkpoint)
tell()
return replies
