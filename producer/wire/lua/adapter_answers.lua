-- The answers to a command so far; those that are given are added first.
-- KEYS[1] prefix
-- ARGV[1] the command's id  [2] and on: a worker's id and its answer as JSON, in turn
-- Returns worker ids and answers, one after the other
local KEPT = 60000
for i = 2, #ARGV, 2 do
  redis.call('HSET', P .. 'answers:' .. ARGV[1], ARGV[i], ARGV[i + 1])
  redis.call('PEXPIRE', P .. 'answers:' .. ARGV[1], KEPT)
end
return redis.call('HGETALL', P .. 'answers:' .. ARGV[1])
