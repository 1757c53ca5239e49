-- Return the server's clock in ms.
-- KEYS[1] prefix
-- Returns the time
return int(NOW)
