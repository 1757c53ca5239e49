"""What every part shares: bounds, sampling fields, JSON values, error codes. Imports nothing else of Pagemill."""
