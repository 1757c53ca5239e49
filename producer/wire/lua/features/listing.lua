-- Chats that can be listed: `chats:<tenant>` has their ids by submission time. The id of a deleted chat stays, so that
-- the page after it can be found.
-- @hook on_submit
LARGEST.listed = 1
do
  local MAX_LISTED = 10000
  local LISTED_TTL = 8 * 86400000

  on_submit[#on_submit + 1] = function(job)
    if not job.listed then
      return
    end
    local _, _, tenant = split_lane(job.lane)
    local key = P .. 'chats:' .. tenant
    redis.call('ZADD', key, int(NOW), job.id)
    redis.call('ZREMRANGEBYSCORE', key, '-inf', int(NOW - LISTED_TTL))
    for _, id in ipairs(redis.call('ZRANGE', key, 0, -MAX_LISTED - 1)) do
      redis.call('ZREM', key, id)
    end
    redis.call('PEXPIRE', key, LISTED_TTL)
  end
end
