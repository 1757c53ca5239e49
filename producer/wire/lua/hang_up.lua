-- Disconnect a client from jobs, and cancel those that no other client waits for.
-- KEYS[1] prefix
-- ARGV[1] the client's name, as in its submissions  [2] and on: ids
-- Returns one of cancelled | requested | done | missing (as cancel does) | kept (other clients wait, or might) per id
-- @include core/cancelling

-- The reply for a job that this client does not end, or that another client has ended.
local function as_it_is(state, ending)
  if not state then
    return 'missing'
  elseif not ACTIVE[state] then
    return 'done'
  end
  return ending and 'requested' or 'kept'
end

local function leave(id)
  local key = P .. 'job:' .. id
  local state, waiters, ending = unpack(redis.call('HMGET', key, 'state', 'waiters', 'ending'))
  if not waiters then
    return as_it_is(state, ending)
  end
  local others = {}
  for waiter in string.gmatch(waiters, '%w+') do
    if waiter ~= ARGV[1] then
      others[#others + 1] = waiter
    end
  end
  redis.call('HDEL', key, 'waiters')
  if #others == 0 then
    return cancel(id)
  end
  redis.call('HSET', key, 'waiters', table.concat(others, ' '))
  return 'kept'
end

local replies = {}
for i = 2, #ARGV do
  replies[i - 1] = leave(ARGV[i])
end
return replies
