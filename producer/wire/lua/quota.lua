-- Return the remaining quotas of tenants.
-- KEYS[1] prefix
-- ARGV tenants
-- Returns a line for each that has quotas, as submit does
-- @include features/quotas
local quotas, lines = new_quotas(), {}
for _, tenant in ipairs(ARGV) do
  lines[#lines + 1] = quotas.line(tenant)
end
return lines
