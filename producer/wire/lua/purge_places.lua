-- Remove remaining data under a tenant's name: keys, lanes, and places in sets.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] and on: pairs of a word and a name: key <name>, lane <lane>, turn <needs>:<class>:<model>,
--   started <minute>, parked '' (over a quota), settings '' (its weight and quotas). Those with waiting jobs stay.
-- Returns the number removed
local removed = 0
local REMOVE = {
  key = function(name)
    return redis.call('UNLINK', P .. name)
  end,
  lane = function(lane)
    if redis.call('EXISTS', P .. 'wait:' .. lane) == 1 then
      return 0
    end
    return redis.call('SREM', P .. 'lanes', lane) + redis.call('HDEL', P .. 'overtaken', lane)
      + redis.call('UNLINK', P .. 'alike:' .. lane)
  end,
  started = function(minute)
    local gone = {}
    for _, field in ipairs(redis.call('HKEYS', P .. 'started:' .. minute)) do
      local _, _, tenant = split_lane(string.match(field, ' (.+)$'))
      if tenant == ARGV[1] then
        gone[#gone + 1] = field
      end
    end
    return #gone > 0 and redis.call('HDEL', P .. 'started:' .. minute, unpack(gone)) or 0
  end,
  turn = function(name)
    local needs, class, model = string.match(name, '^([^:]+):(%w):(.+)$')
    if not needs or redis.call('EXISTS', P .. 'wait:' .. lane_name(needs, class, ARGV[1], model)) == 1 then
      return 0
    end
    return redis.call('ZREM', P .. 'turns:' .. name, ARGV[1])
  end,
  parked = function()
    for _, lane in ipairs(redis.call('SMEMBERS', P .. 'parked:' .. ARGV[1])) do
      if redis.call('EXISTS', P .. 'wait:' .. lane) == 1 then
        return 0
      end
    end
    return redis.call('ZREM', P .. 'parked', ARGV[1]) + redis.call('UNLINK', P .. 'parked:' .. ARGV[1])
  end,
  settings = function()
    return redis.call('HDEL', P .. 'weights', ARGV[1]) + redis.call('HDEL', P .. 'quotas', ARGV[1])
  end
}
for i = 2, #ARGV, 2 do
  removed = removed + REMOVE[ARGV[i]](ARGV[i + 1])
end
return removed
