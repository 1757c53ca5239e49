-- A tenant's batches, newest first, or one of them.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] batch id, '' for all  [3] continue after this id, '' from the first  [4] maximum number
-- Returns {{id, {name, value...}}...}
local found = {}
local function add(id)
  local values = redis.call('HGETALL', P .. 'abatch:' .. id)
  if #values > 0 then
    found[#found + 1] = {id, values}
  end
end
if ARGV[2] ~= '' then
  if redis.call('HGET', P .. 'abatch:' .. ARGV[2], 'tenant') == ARGV[1] then
    add(ARGV[2])
  end
  return found
end
local is_past = ARGV[3] == ''
for _, id in ipairs(redis.call('ZREVRANGE', P .. 'abatches:' .. ARGV[1], 0, -1)) do
  if #found >= tonumber(ARGV[4]) then
    break
  elseif is_past then
    add(id)
  end
  is_past = is_past or id == ARGV[3]
end
return found
