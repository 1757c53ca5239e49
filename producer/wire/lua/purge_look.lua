-- Return a part of the queue's keyspace, to search for a tenant. Walks the keyspace of the server with SCAN.
-- KEYS[1] prefix
-- ARGV[1] cursor, '0' for the start  [2] keys to read  [3] tenant  [4] 1: also data of other tenants
-- Returns {cursor, '0' at the end, {name without the prefix, ours | theirs | orphan (of a job without a record) |
--   other, values}...}. Values: of the tenant's job its state and batch, of another's job fields that may name jobs; of
--   `idem` and `twin` the id, of `bowner` the tenant
local PER_JOB = {
  job = true, ['in'] = true, out = true, ckpt = true, md = true, history = true, followers = true, children = true,
  output = true, settling = true, ['end'] = true, sharers = true
}
-- The other sets hold only data of their own tenant.
local NAMES_JOBS = {followers = true, children = true, settling = true}
local tenant, all = ARGV[3], ARGV[4] == '1'

local function of_job(kind, name, rest)
  local is_shared = kind == 'end' or kind == 'sharers'
  local id = is_shared and string.match(rest, '^(.*):%d+$') or rest
  local found = redis.call('HMGET', P .. 'job:' .. id, 'state', 'lane', 'batch')
  local _, _, owner = split_lane(found[2] or '')
  owner = owner or (is_shared and string.match(rest, '^([^:]+):.*:'))
  if not owner then
    return {name, 'orphan'}
  elseif owner == tenant then
    return {name, 'ours', found[1] or '', found[3] or ''}
  elseif not all then
    return nil
  elseif kind == 'job' then
    local named = redis.call('HMGET', P .. 'job:' .. id, 'leader', 'twin', 'after', 'waits', 'replay_of', 'replayed_as',
      'shared', 'stored', 'stored_result', 'given', 'gave')
    for i = 1, 11 do
      named[i] = named[i] or ''
    end
    return {name, 'theirs', unpack(named)}
  elseif NAMES_JOBS[kind] then
    return {name, 'theirs'}
  end
end

local page = redis.call('SCAN', ARGV[1], 'MATCH', P .. '*', 'COUNT', ARGV[2])
local rows = {}
for _, key in ipairs(page[2]) do
  local name = string.sub(key, #P + 1)
  local kind, rest = string.match(name, '^([^:]*):?(.*)$')
  if PER_JOB[kind] and rest ~= '' then
    rows[#rows + 1] = of_job(kind, name, rest)
  elseif kind == 'abatch' then
    rows[#rows + 1] = {name, redis.call('HGET', key, 'tenant') == tenant and 'ours' or 'theirs'}
  elseif kind == 'bowner' or (all and (kind == 'idem' or kind == 'twin')) then
    rows[#rows + 1] = {name, 'other', redis.call('GET', key) or ''}
  else
    rows[#rows + 1] = {name, 'other'}
  end
end
return {page[1], rows}
