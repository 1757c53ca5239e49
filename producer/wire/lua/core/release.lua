-- Requeue a running job at its earlier rank, without counting an attempt.
-- KEYS[1] prefix
-- ARGV[1] id  [2] token  [3] words that the next worker must know as well, joined by +, or ''  [4] optional, its time
--   per phase, as in commit.lua  [5] optional, 1: drop the checkpoint, which is wrong
-- Returns released | already_done (this call arrived before) | fenced | cancelled | expired
-- @include core/states
-- @include core/fenced
-- @include core/knowing
take_up(ARGV, 4)
local word = refusal(true) or ended_by_request()
if word then
  return word
end
redis.call('HDEL', P .. 'job:' .. id, 'token')
if ARGV[5] == '1' then
  drop_checkpoint()
end
remember(id, job, 'released')
local needs, rest = string.match(job.lane, '^([^:]+)(:.+)$')
for more in string.gmatch(ARGV[3], '[^+]+') do
  needs = knows(needs, more) and needs or needs .. '+' .. more
end
if needs .. rest ~= job.lane then
  job.lane = needs .. rest
  redis.call('HSET', P .. 'job:' .. id, 'lane', job.lane)
end
enqueue(id, job)
redis.call('HSET', P .. 'job:' .. id, 'returned', token)
return 'released'
