"""`pagemill doctor --plan`: what a load takes, before anything is bought or started."""
