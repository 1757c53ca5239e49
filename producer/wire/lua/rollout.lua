-- Change a model's rollout. Repeating a change has no further effect.
-- KEYS[1] prefix
-- ARGV[1] model  [2] start | raise | halt | back | end | forget
-- Of start: [3] share of 10,000  [4] the canary's revision  [5] what decides a job's side: id, tenant or batch
--   [6] margin of 10,000 by which the canary may fail more often  [7] executions of the canary before a halt
-- Of raise: [3] share of 10,000; the rollout is open again if it was halted
-- Of forget: [3] time of its last change, in ms
-- Returns ok | none (there is no rollout to change) | busy (another one is open or halted, or jobs of the last canary
--   must be moved back first, see rollout_back.lua; of forget also: it was changed since) | over (taken back, or ended)
-- @include features/rollouts
local model, action = ARGV[1], ARGV[2]
local key = P .. 'rollout:' .. model
local rollout = rollouts.of(model)
local is_on = rollout and (rollout.state == 'open' or rollout.state == 'halted')
local has_jobs = redis.call('EXISTS', P .. 'canary:' .. model) == 1

local function save(state, share, by, to)
  redis.call('HSET', P .. 'rollouts', model, table.concat({state, int(share), by, to}, ' '))
  redis.call('HSET', key, 'changed_at', int(NOW))
  redis.call('HDEL', key, 'reason')
  ring(model)
  ring(model .. '~' .. to)
end

-- Earlier counts do not apply to the new share.
local function count_anew()
  redis.call('HDEL', key, 'canary:recent', 'canary:recent_failures', 'stable:recent', 'stable:recent_failures')
  redis.call('UNLINK', P .. 'sampled:' .. model)
end

if action == 'start' then
  if is_on and (rollout.to ~= ARGV[4] or rollout.by ~= ARGV[5]) then
    return 'busy'
  elseif has_jobs and not (rollout and rollout.to == ARGV[4]) then
    return 'busy'
  elseif not is_on or rollout.share ~= tonumber(ARGV[3]) or rollout.state ~= 'open' then
    redis.call('UNLINK', key, P .. 'ran:canary:' .. model, P .. 'ran:stable:' .. model)
    count_anew()
    redis.call('HSET', key, 'margin', ARGV[6], 'least', ARGV[7], 'started_at', int(NOW))
    save('open', ARGV[3], ARGV[5], ARGV[4])
  end
elseif not rollout then
  return 'none'
elseif action == 'raise' then
  if not is_on then
    return 'over'
  elseif rollout.state ~= 'open' or rollout.share ~= tonumber(ARGV[3]) then
    count_anew()
    save('open', ARGV[3], rollout.by, rollout.to)
  end
elseif action == 'forget' then
  if rollout.state ~= 'ended' or has_jobs or redis.call('HGET', key, 'changed_at') ~= ARGV[3] then
    return 'busy'
  end
  redis.call('HDEL', P .. 'rollouts', model)
  redis.call('UNLINK', key, P .. 'ran:canary:' .. model, P .. 'ran:stable:' .. model, P .. 'sampled:' .. model)
else
  local state = ({halt = 'halted', back = 'back', ['end'] = 'ended'})[action]
  if action == 'halt' and not is_on then
    return 'over'
  elseif state ~= rollout.state then
    save(state, rollout.share, rollout.by, rollout.to)
  end
end
return 'ok'
