-- Set and return the weights of tenants: while several wait, a tenant of weight 3 has three turns for one turn of a
-- tenant of weight 1, the default. Without further arguments nothing is changed.
-- KEYS[1] prefix
-- ARGV pairs of tenant and weight, a whole number from 1 to 1000
-- Returns pairs of tenant and weight
for i = 1, #ARGV, 2 do
  local weight = tonumber(ARGV[i + 1])
  if not weight or weight < 1 or weight > 1000 or weight ~= math.floor(weight) then
    return redis.error_reply('PAGEMILL bad weight at ARGV ' .. i)
  end
end
for i = 1, #ARGV, 2 do
  if tonumber(ARGV[i + 1]) == 1 then
    redis.call('HDEL', P .. 'weights', ARGV[i])
  else
    redis.call('HSET', P .. 'weights', ARGV[i], ARGV[i + 1])
  end
end
return redis.call('HGETALL', P .. 'weights')
