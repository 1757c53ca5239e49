-- Canaries: prompts on whose output workers agree. `agreed:<what>` holds the answers of workers with the same
-- computation: `answers` (their number), `a<n>`, each worker's `<n>` as `w:<worker>`, and `agreed` once two workers
-- gave the same answer. `audit:<worker>` holds the state of a worker, and `did:<worker>` the jobs that it committed
-- since the canary before its last clean one (features/trails.lua). `accused` holds the workers that deviate or
-- disagree, by time.
local audits = {}
do
  local AGREED_TTL = 30 * 86400000
  local WORKER_TTL = 86400000
  local ACCUSED_TTL = 14 * 86400000

  -- Extend the expiry of a worker's audit state.
  function audits.keep_worker(worker)
    local ttl = redis.call('HGET', P .. 'audit:' .. worker, 'state') == 'quarantined' and ACCUSED_TTL or WORKER_TTL
    redis.call('PEXPIRE', P .. 'audit:' .. worker, ttl)
    redis.call('PEXPIRE', P .. 'did:' .. worker, ttl)
  end

  function audits.keep_agreed(what)
    redis.call('PEXPIRE', P .. 'agreed:' .. what, AGREED_TTL)
  end

  -- `state`: quarantined or disputed. This function never lifts a quarantine.
  function audits.accuse(worker, what, state, reason)
    local key = P .. 'audit:' .. worker
    if redis.call('HGET', key, 'state') ~= 'quarantined' then
      redis.call('HSET', key, 'state', state, 'reason', reason, 'accused_at', NOW_TEXT, 'what', what)
      redis.call('ZADD', P .. 'accused', NOW_TEXT, worker)
    end
    redis.call('ZREMRANGEBYSCORE', P .. 'accused', '-inf', int(NOW - ACCUSED_TTL))
    redis.call('PEXPIRE', P .. 'accused', ACCUSED_TTL)
    audits.keep_worker(worker)
  end

  -- A dispute was decided in the worker's favor.
  function audits.acquit(worker)
    if redis.call('HGET', P .. 'audit:' .. worker, 'state') == 'disputed' then
      redis.call('HDEL', P .. 'audit:' .. worker, 'state', 'reason', 'accused_at')
      redis.call('ZREM', P .. 'accused', worker)
    end
  end
end
