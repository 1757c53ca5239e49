-- @include records
-- @include revisions
-- The executions of a job, as `history` returns them, as names and values, or nil.
local function executions_of(id)
  local key = P .. 'job:' .. id
  local job = redis.call('HMGET', key, 'lane', 'state', 'shared')
  if not job[1] then
    return nil
  end
  local _, _, _, model = split_lane(job[1])
  local notice_at = redis.call('ZSCORE', P .. 'outbox', id)
  return {
    'notice_at', notice_at and int(notice_at) or '', 'record', redis.call('HGETALL', key), 'executions', redis.call('LRANGE', P .. 'history:' .. id, 0, -1),
    'error', job[2] ~= 'succeeded' and outcome_of(id, job[3]) or '',
    'live_workers', redis.call('ZCOUNT', P .. 'serves:' .. model, int(NOW), '+inf'),
    'is_unmet', job[2] == 'queued' and is_unmet(job[1]) and 1 or 0
  }
end
