-- The jobs that a worker committed since its last clean canary: `did:<worker>`, in order. `audit:<worker>` has the
-- number of deleted entries before them (`base`), the position up to which a clean canary cleared them (`clean_to`),
-- the position up to which excess entries were dropped (`lost_to`), and the bytes of inputs kept for them (`held`).
local trails = {}
do
  local TRIMMED = 256 -- entries in a call

  -- An entry is `<id>`, or `<id> <bytes>` if the job's input is kept for this list.
  function trails.read(entry)
    local id, bytes = string.match(entry, '^(%S+) ?(%d*)$')
    return id, tonumber(bytes)
  end

  -- Delete the first entries, with the inputs that are kept for them.
  function trails.forget(worker, count)
    local key, held = P .. 'did:' .. worker, 0
    for _, entry in ipairs(redis.call('LRANGE', key, 0, count - 1)) do
      local id, bytes = trails.read(entry)
      if bytes then
        held = held + bytes
        redis.call('UNLINK', P .. 'in:' .. id)
      end
    end
    redis.call('LTRIM', key, count, -1)
    redis.call('HINCRBY', P .. 'audit:' .. worker, 'base', count)
    redis.call('HINCRBY', P .. 'audit:' .. worker, 'held', int(0 - held))
  end

  -- Delete entries that a clean canary cleared. Returns the position after the last entry, and whether more are left.
  function trails.trim(worker)
    local found = redis.call('HMGET', P .. 'audit:' .. worker, 'base', 'clean_to', 'lost_to')
    local base, clean_to = tonumber(found[1] or 0), tonumber(found[2] or 0)
    local length = redis.call('LLEN', P .. 'did:' .. worker)
    if found[3] and tonumber(found[3]) <= clean_to then
      redis.call('HDEL', P .. 'audit:' .. worker, 'lost_to')
    end
    local left = math.min(clean_to - base, length)
    if left > 0 then
      trails.forget(worker, math.min(left, TRIMMED))
    end
    return base + length, left > TRIMMED
  end
end
