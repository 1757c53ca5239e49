-- Delete a batch that has no jobs any more.
-- KEYS[1] prefix
-- ARGV[1] batch id
-- Returns 1, or 0 if it has jobs
local counts = redis.call('HMGET', P .. 'batch:' .. ARGV[1], 'queued', 'delayed', 'running')
for i = 1, 3 do
  if tonumber(counts[i] or 0) > 0 then
    return 0
  end
end
redis.call('ZREM', P .. 'bexpiry', ARGV[1])
for _, kind in ipairs({'batch:', 'bjobs:', 'bfeed:', 'backed:', 'bowner:'}) do
  redis.call('UNLINK', P .. kind .. ARGV[1])
end
return 1
