-- @include core/choosing
-- A released job is left to the worker that ran its parent while there are other jobs in its class. Like the oldest job
-- of any lane, it may be passed over 64 times.

-- Whether the oldest job of a lane, and all jobs that this worker would prefer to it, are reserved for another worker.
local function is_anothers(lane)
  if is_urgent or not have_waited(lane) or overtakes(lane) >= OVERTAKES then
    return false
  end
  local name, rank = oldest(lane)
  local _, affinity = split_member(name)
  return affinity and #affinity == #near and affinity ~= near and not first_alike(lane, near, rank)
end

-- The lane to take from instead of a reserved one.
local function or_another(lane)
  if is_anothers(lane) then
    local _, class, _, model = split_lane(lane)
    for _, place in ipairs(places_of(class, model)) do
      local other = not have_waited(place.needs) and next_lane(place, class, model)
      if other then
        overtaken[lane] = overtakes(lane) + 1
        touched[lane] = true
        return other
      end
    end
  end
  return lane
end
