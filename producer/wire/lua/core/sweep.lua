-- Run the clock for a queue: lapsed leases, deadlines, due jobs, expired batches.
-- KEYS[1] prefix
-- ARGV[1] maximum number of each  [2] ms since a lease must have lapsed
-- Returns names and values, without those that are 0 or empty: reclaimed, dead, cancelled, expired, promoted, next_due
--   (ms until the next delayed job is due, if there is one), buried ({id, crashes} of each that became dead), lapsed
--   ({id, worker} of each whose lease lapsed), memory (1: near the queue's limit, 2: at it; new jobs are rejected)
-- @include core/sweeping
-- @include core/memory
-- The queue warns from this share of maxmemory below the limit on.
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
