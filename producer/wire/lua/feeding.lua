-- @include records
-- What feed.lua returns for these arguments of its.
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
