"""OpenAI's HTTP interface in front of a queue. Parallel gateways only share Redis."""
