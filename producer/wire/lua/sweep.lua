-- Run the clock for a queue: lapsed leases, deadlines, due jobs, expired batches.
-- KEYS[1] prefix
-- ARGV[1] how many of each at most  [2] ms that a lease must have been over
-- Returns {reclaimed, dead, cancelled, expired, promoted, ms until the next delayed job is due or -1,
--   {{id, crashes} of each that became dead}, {{id, worker} of each whose lease lapsed}}
-- @include sweeping
charging().unpark()
return sweep(tonumber(ARGV[1]), tonumber(ARGV[2]))
