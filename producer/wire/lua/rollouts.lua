-- Return the state of rollouts, without writing.
-- KEYS[1] prefix
-- ARGV models; none for all
-- Returns per model with a rollout names and values: model, rollout (`<state> <share> <by> <revision>`), counted (names
--   and values), canary_ms (durations of the canary's latest executions), stable_ms (the same of the stable side),
--   canary_workers (live ones of the canary), workers (live ones of the model)
-- @include features/rollouts
local models, replies = {unpack(ARGV)}, {}
if #models == 0 then
  models = redis.call('HKEYS', P .. 'rollouts')
end
for _, model in ipairs(models) do
  local rollout = rollouts.of(model)
  if rollout then
    replies[#replies + 1] = {
      'model', model, 'rollout', redis.call('HGET', P .. 'rollouts', model),
      'counted', redis.call('HGETALL', P .. 'rollout:' .. model),
      'canary_ms', redis.call('LRANGE', P .. 'ran:canary:' .. model, 0, -1),
      'stable_ms', redis.call('LRANGE', P .. 'ran:stable:' .. model, 0, -1),
      'canary_workers', rollouts.live_workers(model .. '~' .. rollout.to), 'workers', rollouts.live_workers(model)
    }
  end
end
return replies
