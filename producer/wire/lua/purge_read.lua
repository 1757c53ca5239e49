-- Return a part of a key's contents, of any type, without scores.
-- KEYS[1] prefix
-- ARGV[1] name without the prefix  [2] where to continue, '' for the start  [3] number of items  [4] bytes of a string
-- Returns {where to continue, '' at the end, items}. Parts of a string overlap, so that no word is split
local OVERLAP = 256
local key, from, most = P .. ARGV[1], ARGV[2], tonumber(ARGV[3])
local kind = redis.call('TYPE', key)['ok']

local function every_second(flat)
  local items = {}
  for i = 1, #flat, 2 do
    items[#items + 1] = flat[i]
  end
  return items
end

local function scanned(command)
  local page = redis.call(command, key, from == '' and '0' or from, 'COUNT', most)
  return {page[1] == '0' and '' or page[1], command == 'ZSCAN' and every_second(page[2]) or page[2]}
end

if kind == 'string' then
  local start, size = tonumber(from) or 0, tonumber(ARGV[4])
  local part = redis.call('GETRANGE', key, start, start + size - 1)
  return {#part == size and int(start + size - OVERLAP) or '', {part}}
elseif kind == 'list' then
  local start = tonumber(from) or 0
  local items = redis.call('LRANGE', key, start, start + most - 1)
  return {#items == most and int(start + most) or '', items}
elseif kind == 'stream' then
  local items, last = {}, ''
  for _, entry in ipairs(redis.call('XRANGE', key, from == '' and '-' or from, '+', 'COUNT', most)) do
    last = entry[1]
    for _, value in ipairs(entry[2]) do
      items[#items + 1] = value
    end
  end
  -- An entry is returned twice, at the end of a part and at the start of the next; a single entry is the last.
  return {(last ~= from and last) or '', items}
elseif kind == 'hash' then
  return scanned('HSCAN')
elseif kind == 'set' then
  return scanned('SSCAN')
elseif kind == 'zset' then
  return scanned('ZSCAN')
end
return {'', {}}
