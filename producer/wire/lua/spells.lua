-- Spells: periods in which a cause kept jobs from starting, so that `why` can name it. Each cause has a list, newest
-- first, with `<from> <to>` of each spell, and `<from> -` of one that has not ended. Written per cause, never per job.
local MAX_SPELLS = 64
local SPELLS_TTL = 604800000
local JOINED = 1000 -- ms between two spells that count as one, since causes are checked only periodically

local function last_spell(key)
  return string.match(redis.call('LRANGE', key, 0, 0)[1] or '', '^(%d+) (%S+)$')
end

-- `instead`: replaces the last spell.
local function save_spell(key, from, to, instead)
  redis.call('LTRIM', key, instead and 1 or 0, instead and MAX_SPELLS - 1 or MAX_SPELLS - 2)
  redis.call('LPUSH', key, from .. ' ' .. to)
  redis.call('PEXPIRE', key, SPELLS_TTL)
end

-- Record a spell from one time to another, `to` nil if it has not ended; it extends one that ended just before.
local function note_spell(key, from, to)
  local start, stop = last_spell(key)
  if stop == '-' and not to then
    return
  end
  local goes_on = start and tonumber(start) <= from and (stop == '-' or stop + JOINED >= from)
  save_spell(key, goes_on and start or int(from), to and int(to) or '-', goes_on)
end

-- End the current spell, if there is one.
local function end_spell(key)
  local start, stop = last_spell(key)
  if stop == '-' then
    save_spell(key, start, int(math.max(NOW, tonumber(start))), true)
  end
end
