-- @include core/memory
local LOOK_EVERY = 1000
-- With more free memory than this, submissions are not booked between two reads.
local PLENTY = 268435456

-- Bytes that may be added until the server's memory is read again, once per second; nil: no limit. `looked` is the
-- field `memory_looked`: until that time memory is plentiful.
local function memory_room(looked)
  local left = (looked or 0) - NOW
  if left > 0 and left <= LOOK_EVERY then
    return nil
  end
  local meta = redis.call('HMGET', P .. 'meta', 'memory_at', 'memory_room', 'memory_share')
  local age = NOW - (meta[1] or 0)
  if age >= 0 and age < LOOK_EVERY then
    return tonumber(meta[2])
  end
  local memory = read_memory()
  local room = memory and math.floor((meta[3] or MEMORY_SHARE) * memory[2] - memory[1])
  -- The removal comes first, so that the writes pass at maxmemory.
  redis.call('HDEL', P .. 'meta', 'memory_looked', 'memory_at', 'memory_room')
  if not room or room > PLENTY then
    redis.call('HSET', P .. 'meta', 'memory_looked', int(NOW + LOOK_EVERY))
    return nil
  end
  redis.call('HSET', P .. 'meta', 'memory_at', int(NOW), 'memory_room', int(room))
  return room
end

-- Book the bytes added, and the number of jobs rejected because memory ran out.
local function book_memory(bytes, refused)
  if bytes > 0 then
    redis.call('HINCRBY', P .. 'meta', 'memory_room', -bytes)
  end
  if refused > 0 then
    redis.call('HDEL', P .. 'meta', '') -- a removal, so that the later writes pass at maxmemory
    redis.call('HINCRBY', P .. 'meta', 'memory_rejections', refused)
  end
end
