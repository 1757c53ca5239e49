-- Run the clock for a queue: lapsed leases, deadlines, due jobs, expired batches.
-- KEYS[1] prefix
-- ARGV[1] how many of each at most  [2] ms that a lease must have been over
-- Returns {reclaimed, dead, cancelled, expired, promoted, ms until the next delayed job is due or -1,
--   {{id, crashes} of each that became dead}, {{id, worker} of each whose lease lapsed},
--   {memory: 0, 1 near its limit, or 2 where submits are refused; large results removed for it}}
-- @include sweeping
-- @include relief
charging().unpark()
local done = sweep(tonumber(ARGV[1]), tonumber(ARGV[2]))
done[#done + 1] = relieve()
return done
