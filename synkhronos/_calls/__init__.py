"""From the arguments of a call to one command: checked, cast, put where all ranks see them."""
