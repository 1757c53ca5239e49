-- The dead letters, the latest death first.
-- KEYS[1] prefix
-- ARGV[1] how many to pass over  [2] letters at most
-- Returns {letters looked at, letter per job that is still there}
-- @include letters
local ids = redis.call('ZREVRANGE', P .. 'dead', ARGV[1], ARGV[1] + ARGV[2] - 1)
local letters = {}
for _, id in ipairs(ids) do
  letters[#letters + 1] = letter(id) or nil
end
return {#ids, letters}
