-- Take a worker off the list.
-- KEYS[1] prefix
-- ARGV[1] worker id
-- Returns 1
-- @include common
local info = redis.call('GET', P .. 'about:' .. ARGV[1]) or redis.call('GET', P .. 'worker:' .. ARGV[1])
redis.call('ZREM', P .. 'workers', ARGV[1])
redis.call('UNLINK', P .. 'worker:' .. ARGV[1], P .. 'about:' .. ARGV[1], P .. 'puller:' .. ARGV[1])
local known = info and cjson.decode(info) or {}
local function no_longer_serves(name)
  redis.call('ZREM', P .. 'serves:' .. name, ARGV[1])
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
