"""One model on several devices: each rank holds a share of every layer and runs the plans that rank 0 sends."""
