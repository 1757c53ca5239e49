-- Append what a job generated, and say how far it is. Fenced, append-only, all or nothing.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token  [3] progress `<phase> <prompt done> <prompt> <generated> <max>`  [4] fingerprint or ''
-- ARGV[5] 1: drop the checkpoint first; then per delta: sample index, offset, number of tokens, entry
-- Returns ok | cancelled (written, but stop the job) | stale | bad_offset (nothing written)
-- @include common
local id, token, restart = ARGV[1], ARGV[2], ARGV[5] == '1'
local key, feed = P .. 'job:' .. id, P .. 'ckpt:' .. id
local job = redis.call('HMGET', key, 'state', 'token', 'ending', 'stream', 'n', 'saved')
if job[1] ~= 'running' or job[2] ~= token then
  return 'stale'
end

-- The same call may come twice, its first reply lost: then its entries are the last ones already.
local function is_replay()
  local entries = (#ARGV - 5) / 4
  local last = entries > 0 and redis.call('LRANGE', feed, -entries, -1)
  for i = 1, entries do
    if last[i] ~= ARGV[5 + 4 * i] then
      return false
    end
  end
  return entries > 0
end

local lengths, grown = {}, 0
local replay = is_replay()
for i = 6, #ARGV, 4 do
  local name = 'len:' .. ARGV[i]
  local length = lengths[name] or (not restart and tonumber(redis.call('HGET', key, name) or 0)) or 0
  if not replay then
    if tonumber(ARGV[i + 1]) ~= length or tonumber(ARGV[i]) >= tonumber(job[5] or 1) then
      return 'bad_offset'
    end
    lengths[name] = length + tonumber(ARGV[i + 2])
    grown = grown + tonumber(ARGV[i + 2])
  end
end

-- Removals first, so that a server at maxmemory lets the rest through.
redis.call('HDEL', key, 'progress')
if restart and not replay then
  for i = 0, tonumber(job[5] or 1) - 1 do
    redis.call('HDEL', key, 'len:' .. i)
  end
  redis.call('UNLINK', feed)
  redis.call('HDEL', key, 'saved')
  redis.call('HINCRBY', key, 'epoch', 1)
end
redis.call('HSET', key, 'progress', ARGV[3], 'progress_at', int(NOW))
if ARGV[4] ~= '' then
  redis.call('HSET', key, 'fingerprint', ARGV[4])
end
if string.sub(ARGV[3], 1, 7) ~= 'waiting' then
  redis.call('HSET', key, 'stepped', 1)
end
if not replay then
  local saved = not restart and tonumber(job[6] or 0) or 0
  for i = 6, #ARGV, 4 do
    redis.call('RPUSH', feed, ARGV[i + 3])
    saved = saved + #ARGV[i + 3]
  end
  if saved > 0 then
    redis.call('HSET', key, 'saved', saved)
  end
  for name, length in pairs(lengths) do
    redis.call('HSET', key, name, length)
  end
end
if grown > 0 then
  redis.call('HSET', key, 'advanced', 1)
  redis.call('HDEL', key, 'crashes')
end
if job[4] and #ARGV > 5 then
  redis.call('PUBLISH', P .. 'feed', id)
end
return job[3] and 'cancelled' or 'ok'
