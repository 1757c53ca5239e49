-- Return the answers to a command so far. Answers in the arguments are added first.
-- KEYS[1] prefix
-- ARGV[1] the command's id  [2] and on: pairs of a worker's id and its answer as JSON
-- Returns pairs of worker id and answer
local KEPT = 60000
for i = 2, #ARGV, 2 do
  redis.call('HSET', P .. 'answers:' .. ARGV[1], ARGV[i], ARGV[i + 1])
  redis.call('PEXPIRE', P .. 'answers:' .. ARGV[1], KEPT)
end
return redis.call('HGETALL', P .. 'answers:' .. ARGV[1])
