-- The revisions of a model that live workers announce, apart by spaces, from those of some workers; `name` is the last part
-- of a lane whose jobs are pinned, else there are none to tell of.
local MAX_ASKED = 64
local function live_revisions(name)
  local model = string.match(name, '^(.*)~')
  local found, seen = {}, {}
  local ids = model and redis.call('ZRANGEBYSCORE', P .. 'serves:' .. model, int(NOW), '+inf', 'LIMIT', 0, MAX_ASKED)
  for _, id in ipairs(ids or {}) do
    local info = redis.call('GET', P .. 'about:' .. id)
    local revision = info and cjson.decode(info).revision or ''
    if revision ~= '' and not seen[revision] then
      seen[revision] = true
      found[#found + 1] = revision
    end
  end
  table.sort(found)
  return table.concat(found, ' ')
end
