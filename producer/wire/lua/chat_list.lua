-- List a page of a tenant's successful chats, ordered by submission time.
-- KEYS[1] prefix
-- ARGV[1] tenant  [2] the id before the first, '' from the end  [3] 1: the latest first  [4] number to read
-- Returns {{id, metadata}..., the last id read, '' at the end}: up to about 1 MiB
local MAX_BYTES = 1048576
local key, from, is_desc = P .. 'chats:' .. ARGV[1], 0, ARGV[3] == '1'
if ARGV[2] ~= '' then
  local rank = redis.call('ZRANK', key, ARGV[2])
  if not rank then
    return {{}, ''}
  end
  from = is_desc and redis.call('ZCARD', key) - rank or rank + 1
end
local ids = redis.call(is_desc and 'ZREVRANGE' or 'ZRANGE', key, from, from + ARGV[4] - 1)
local rows, bytes, last = {}, 0, ''
for i, id in ipairs(ids) do
  local metadata = redis.call('HGET', P .. 'job:' .. id, 'state') == 'succeeded' and redis.call('GET', P .. 'md:' .. id)
  if metadata then
    rows[#rows + 1] = {id, metadata}
    bytes = bytes + #metadata
  end
  if bytes >= MAX_BYTES or i == tonumber(ARGV[4]) then
    last = id
    break
  end
end
return {rows, last}
