-- Set or return the address of the jobs page. Gateways refresh it regularly, and live pages link to it.
-- KEYS[1] prefix
-- ARGV[1] its address, '' to read only  [2] ms that it is valid for
-- Returns the address, '' for none
if ARGV[1] ~= '' then
  redis.call('SET', P .. 'jobs_page', ARGV[1], 'PX', ARGV[2])
end
return redis.call('GET', P .. 'jobs_page') or ''
