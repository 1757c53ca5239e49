"""OpenAI's HTTP interface in front of a queue. Parallel gateways share nothing but Redis."""
