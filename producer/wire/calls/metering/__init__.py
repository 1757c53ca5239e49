"""Calls that meter tenants: the ledger of their usage, and quotas."""
