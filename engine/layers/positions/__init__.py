"""How a token's place enters attention."""
