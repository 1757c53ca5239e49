-- Where the page of jobs is: gateways say it again and again, live pages link to it.
-- KEYS[1] prefix
-- ARGV[1] its address, '' to ask only  [2] ms that it holds for
-- Returns the address, '' for none
if ARGV[1] ~= '' then
  redis.call('SET', P .. 'jobs_page', ARGV[1], 'PX', ARGV[2])
end
return redis.call('GET', P .. 'jobs_page') or ''
