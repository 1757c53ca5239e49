-- List the dead letters, the latest first.
-- KEYS[1] prefix
-- ARGV[1] number to skip  [2] maximum number
-- Returns {letters read, a letter per job that still exists}
-- @include letters
local ids = redis.call('ZREVRANGE', P .. 'dead', ARGV[1], ARGV[1] + ARGV[2] - 1)
local letters = {}
for _, id in ipairs(ids) do
  letters[#letters + 1] = letter(id) or nil
end
return {#ids, letters}
