-- Whether the known words include all words of a lane's needs; both are joined by +.
local function knows(known, needs)
  for word in string.gmatch(needs, '[^+]+') do
    if not string.find('+' .. known .. '+', '+' .. word .. '+', 1, true) then
      return false
    end
  end
  return true
end

-- The same for the words in a live worker's record.
local function record_knows(info, needs)
  return knows(string.match(info or '', '"knows":"([^"]*)"') or '1', needs)
end
