"""Calls that meter tenants: the ledger of what they used, and the quotas that hold them to it."""
