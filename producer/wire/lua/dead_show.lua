-- Return dead letters with their contents.
-- KEYS[1] prefix
-- ARGV job ids
-- Returns per id an empty list (not a dead job) or {letter, payload or '', checkpoint entries}
-- @include letters
-- @include outputs
local replies = {}
for i, id in ipairs(ARGV) do
  local found = letter(id)
  replies[i] = found
    and {found, payload_of(id), redis.call('LRANGE', P .. 'ckpt:' .. id, 0, -1)} or {}
end
return replies
