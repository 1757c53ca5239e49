-- Return the tokens of jobs from a position on. The checkpoint is the feed.
-- KEYS[1] prefix
-- ARGV per job the number of arguments, and [1] id  [2] epoch last seen  [3] entries seen  [4] maximum number of
--   entries
-- Returns per job names and values: state (none: unknown job), epoch, attempt, entries, outcome (if it has ended),
--   leader (the job whose end it shares). A different epoch means that the job restarted from its prompt: the entries
--   then count from 0.
-- @include records
-- @include core/each
local NAMES = {'state', 'epoch', 'attempt', 'entries', 'outcome', 'leader'}

local function feed(args)
  local job = redis.call('HMGET', P .. 'job:' .. args[1], 'state', 'epoch', 'attempt', 'shared', 'leader')
  local epoch = tonumber(job[2] or 0)
  local from = epoch == tonumber(args[2]) and tonumber(args[3]) or 0
  local entries = redis.call('LRANGE', P .. 'ckpt:' .. args[1], from, from + args[4] - 1)
  local outcome = job[1] and has_ended(job[1]) and outcome_of(args[1], job[4])
  return named(NAMES, {job[1], epoch, tonumber(job[3] or 0), entries, outcome, job[5]})
end
return each(feed)
