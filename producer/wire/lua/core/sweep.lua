-- Run the clock for a queue: lapsed leases, deadlines, due jobs, expired batches.
-- KEYS[1] prefix
-- ARGV[1] how many of each at most  [2] ms that a lease must have been over
-- Returns names and values, without what is 0 or empty: reclaimed, dead, cancelled, expired, promoted, next_due (ms until
--   the next delayed job is due, if there is one), buried ({id, crashes} of each that became dead), lapsed ({id, worker} of
--   each whose lease lapsed), memory (the server's: 1 near the queue's limit, 2 at it, so that new jobs are rejected)
-- @include core/sweeping
-- @include core/memory
-- From this much of maxmemory below the limit on, the queue warns.
local MEMORY_WARNING = 0.1

local function memory_level()
  local memory = read_memory()
  local share = memory and tonumber(redis.call('HGET', P .. 'meta', 'memory_share') or MEMORY_SHARE)
  if not memory or memory[1] <= (share - MEMORY_WARNING) * memory[2] then
    return 0
  end
  return memory[1] >= share * memory[2] and 2 or 1
end

local done = sweep(tonumber(ARGV[1]), tonumber(ARGV[2]))
done.memory = memory_level()
return swept_reply(done)
