-- Set and return the quotas of tenants. Without further arguments nothing is changed.
-- KEYS[1] prefix
-- ARGV pairs of a tenant, or * for every tenant without separate quotas, and `<tokens a minute> <jobs a minute> <tokens
--   a day> <jobs a day> <jobs that run at once>`, `-` for each that is unlimited; '' removes the tenant's quotas
-- Returns pairs of tenant and quotas, as in the arguments
local HIGHEST = 1e12
local function is_sound(quota)
  local parts = 0
  for part in string.gmatch(quota, '%S+') do
    local number = tonumber(part)
    if part ~= '-' and not (number and number >= 1 and number <= HIGHEST and number == math.floor(number)) then
      return false
    end
    parts = parts + 1
  end
  return quota == '' or (parts == 4 or parts == 5)
end
for i = 1, #ARGV, 2 do
  if not (ARGV[i] == '*' or string.match(ARGV[i], '^[%w._@-]+$')) or not ARGV[i + 1] or not is_sound(ARGV[i + 1]) then
    return redis.error_reply('PAGEMILL bad quota at ARGV ' .. i)
  end
end
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', P .. 'quotas', ARGV[i])
  else
    redis.call('HSET', P .. 'quotas', ARGV[i], ARGV[i + 1])
  end
end
if #ARGV > 0 then
  -- All parked lanes are checked again.
  for _, tenant in ipairs(redis.call('ZRANGE', P .. 'parked', 0, -1)) do
    redis.call('ZADD', P .. 'parked', int(NOW), tenant)
  end
  local are_set = redis.call('HGET', P .. 'meta', 'quotas') == '1'
  if redis.call('EXISTS', P .. 'quotas', P .. 'parked') > 0 then
    redis.call('HSET', P .. 'meta', 'quotas', 1)
    -- From now on pulls add the jobs that start.
    for _, id in ipairs(are_set and {} or redis.call('ZRANGE', P .. 'leases', 0, -1)) do
      local tenant = string.match(redis.call('HGET', P .. 'job:' .. id, 'lane') or '', '^[^:]+:%w:([^:]+):')
      if tenant then
        redis.call('ZADD', P .. 'runs', 0, tenant .. ' ' .. id)
      end
    end
  else
    redis.call('UNLINK', P .. 'runs')
    redis.call('HDEL', P .. 'meta', 'quotas')
  end
end
return redis.call('HGETALL', P .. 'quotas')
