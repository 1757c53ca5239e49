"""The commands of `pagemill`, one module each; they register themselves with `app`."""
