-- What is known of rollouts. Reads only.
-- KEYS[1] prefix
-- ARGV models; none for all
-- Returns per model with a rollout {model, `<state> <share> <by> <revision>`, names and values of what is counted,
--   ms that the canary's latest executions took, those of the stable side, live workers of the canary, live workers of the model}
-- @include features/rollouts
local models, replies = {unpack(ARGV)}, {}
if #models == 0 then
  models = redis.call('HKEYS', P .. 'rollouts')
end
for _, model in ipairs(models) do
  local rollout = rollouts.of(model)
  if rollout then
    replies[#replies + 1] = {
      model, redis.call('HGET', P .. 'rollouts', model), redis.call('HGETALL', P .. 'rollout:' .. model),
      redis.call('LRANGE', P .. 'ran:canary:' .. model, 0, -1), redis.call('LRANGE', P .. 'ran:stable:' .. model, 0, -1),
      rollouts.live_workers(model .. '~' .. rollout.to), rollouts.live_workers(model)
    }
  end
end
return replies
