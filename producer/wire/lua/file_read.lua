-- Return a chunk of a file.
-- KEYS[1] prefix
-- ARGV[1] file id  [2] number, from 0
-- Returns its bytes, or nothing
return redis.call('GET', P .. 'file:' .. ARGV[1] .. ':' .. ARGV[2])
