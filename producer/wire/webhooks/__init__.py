"""Requests to webhooks: the allowed addresses, the signatures, and the requests themselves."""
