-- Tokens of a job from a position on: the checkpoint is the feed.
-- KEYS[1] prefix
-- ARGV[1] id  [2] epoch last seen  [3] entries seen  [4] entries at most
-- Returns {state or '', epoch, attempt, entries, outcome if it has ended, the job whose end it is or ''}. Another epoch than the one asked for
--   means that the job began again from its prompt: the entries then count from 0.
-- @include records
local job = redis.call('HMGET', P .. 'job:' .. ARGV[1], 'state', 'epoch', 'attempt', 'shared', 'leader')
local epoch = tonumber(job[2] or 0)
local from = epoch == tonumber(ARGV[2]) and tonumber(ARGV[3]) or 0
local entries = redis.call('LRANGE', P .. 'ckpt:' .. ARGV[1], from, from + ARGV[4] - 1)
local out = ''
if job[1] and has_ended(job[1]) then
  out = outcome_of(ARGV[1], job[4])
end
return {job[1] or '', epoch, tonumber(job[3] or 0), entries, out, job[5] or ''}
