-- Stop or resume pulling from a queue.
-- KEYS[1] prefix
-- ARGV[1] 1 to pause, 0 to resume
-- Returns 1
-- @include spells
if ARGV[1] == '1' then
  redis.call('HSET', P .. 'meta', 'paused', '1')
  note_spell(P .. 'spells:paused', NOW)
else
  redis.call('HDEL', P .. 'meta', 'paused')
  end_spell(P .. 'spells:paused')
  -- There may be many tenants, but there are few workers, and so few models whose bells are read.
  local models = {}
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', P .. 'workers', int(NOW), '+inf', 'LIMIT', 0, 1000)) do
    local info = redis.call('GET', P .. 'worker:' .. worker)
    for _, model in ipairs(info and cjson.decode(info).models or {}) do
      models[model] = true
    end
  end
  for model in pairs(models) do
    ring(model)
  end
end
return 1
