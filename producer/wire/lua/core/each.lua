-- Whether the script was called for a single job.
local is_alone = tonumber(ARGV[1]) + 1 == #ARGV

-- Call `one` with the arguments of each job, which follow their number. Returns the replies to the first jobs: a job
-- that fails or does not fit `has_room`, and all jobs after it, must be sent separately. The script then raises the
-- job's error.
local function each(one, has_room)
  if is_alone then
    return {one({unpack(ARGV, 2)})}
  end
  local replies, at = {}, 1
  while at <= #ARGV and (not has_room or has_room()) do
    local count = tonumber(ARGV[at])
    local is_well, reply = pcall(one, {unpack(ARGV, at + 1, at + count)})
    if not is_well then
      break
    end
    replies[#replies + 1] = reply
    at = at + count + 1
  end
  return replies
end
