-- Tokens of jobs from a position on: the checkpoint is the feed.
-- KEYS[1] prefix
-- ARGV per job how many arguments follow, and [1] id  [2] epoch last seen  [3] entries seen  [4] entries at most
-- Returns per job {state or '', epoch, attempt, entries, outcome if it has ended, the job whose end it is or ''}. Another epoch
--   than the one asked for means that the job began again from its prompt: the entries then count from 0.
-- @include records
-- @include core/each
local function feed(args)
  local job = redis.call('HMGET', P .. 'job:' .. args[1], 'state', 'epoch', 'attempt', 'shared', 'leader')
  local epoch = tonumber(job[2] or 0)
  local from = epoch == tonumber(args[2]) and tonumber(args[3]) or 0
  local entries = redis.call('LRANGE', P .. 'ckpt:' .. args[1], from, from + args[4] - 1)
  local out = ''
  if job[1] and has_ended(job[1]) then
    out = outcome_of(args[1], job[4])
  end
  return {job[1] or '', epoch, tonumber(job[3] or 0), entries, out, job[5] or ''}
end
return each(feed)
