"""Turn the arguments of a call into one command: check, cast, and put them into shared memory."""
