"""What drafts are made of, and what they cost."""
