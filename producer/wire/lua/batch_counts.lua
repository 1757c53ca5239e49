-- Return the number of a batch's jobs per state. The counts add up to the total, since one script changes both.
-- KEYS[1] prefix
-- ARGV[1] batch id
-- Returns pairs of name and count; nothing for an unknown batch
return redis.call('HGETALL', P .. 'batch:' .. ARGV[1])
