-- @include core/hooks
-- @include spells
-- The data that `why` reads: the jobs of each lane started per second, for an hour, and when the rate limit held all
-- jobs.
-- @hook on_pull
do
  local STARTED_TTL = 3600000
  local MAX_FIELDS = 1024 -- per minute: beyond it lanes are not distinguished
  local starts = {}

  on_start[#on_start + 1] = function(_, _, lane)
    starts[lane] = (starts[lane] or 0) + 1
  end

  on_flush[#on_flush + 1] = function()
    local minute = math.floor(NOW / 60000)
    local key, second = P .. 'started:' .. int(minute), int(math.floor(NOW / 1000) - minute * 60)
    for lane, number in pairs(starts) do
      local field = second .. ' ' .. lane
      if redis.call('HINCRBY', key, field, number) == number then
        redis.call('PEXPIRE', key, STARTED_TTL)
        if redis.call('HLEN', key) > MAX_FIELDS then
          redis.call('HDEL', key, field)
          redis.call('HINCRBY', key, second .. ' *', number)
        end
      end
    end
  end

  on_limited[#on_limited + 1] = function(ms)
    redis.call('HDEL', P .. 'meta', '') -- a removal, so that the later writes pass at maxmemory
    note_spell(P .. 'spells:rate', NOW, NOW + ms)
  end
end
