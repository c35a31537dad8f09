"""From the arguments of a call to one command: checked, cast, put into shared memory."""
