"""Between text and tokens, on the way in and on the way out."""
