-- List the models, and the adapters as <model>#<adapter>, that a worker served within a day.
-- KEYS[1] prefix
-- Returns their names
return redis.call('ZRANGE', P .. 'served', 0, -1)
