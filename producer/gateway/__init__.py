"""OpenAI's HTTP interface in front of a queue. Gateways side by side share nothing but Redis."""
