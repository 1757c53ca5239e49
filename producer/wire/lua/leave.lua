-- Unregister a worker.
-- KEYS[1] prefix
-- ARGV[1] worker id
-- Returns 1
local info = redis.call('GET', P .. 'worker:' .. ARGV[1])
redis.call('ZREM', P .. 'workers', ARGV[1])
redis.call('UNLINK', P .. 'worker:' .. ARGV[1], P .. 'puller:' .. ARGV[1])
local known = info and cjson.decode(info) or {}
local function no_longer_serves(name)
  redis.call('ZREM', P .. 'serves:' .. name, ARGV[1])
  if redis.call('ZCOUNT', P .. 'serves:' .. name, int(NOW), '+inf') == 0 then
    local alive = P .. 'alive:' .. name
    for _, knows in ipairs(redis.call('HKEYS', alive)) do
      -- For `why`, as in heartbeat.lua.
      if tonumber(string.match(redis.call('HGET', alive, knows), '%d+$')) > NOW then
        redis.call('HSET', alive, knows, int(NOW) .. ' ' .. int(NOW))
      end
    end
  end
  if (known.revision or '') ~= '' then
    redis.call('ZREM', P .. 'serves:' .. name .. '~' .. known.revision, ARGV[1])
  end
end
for _, model in ipairs(known.models or {}) do
  no_longer_serves(model)
  for _, adapter in ipairs(known.adapters or {}) do
    no_longer_serves(model .. '#' .. adapter)
  end
end
return 1
