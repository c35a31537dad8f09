"""A model for rules of which rank 0 writes the walk of a step to the file that WALK_FILE names."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import rule_model

from support.walks import Counter

WARM = 5  # steps, before the shortest walk of the next three


class Model(rule_model.Model):
    """Counts from the begin of each step of training to the begin of the next."""

    n_steps, counter, walks = 0, None, ()

    def train_iter(self, count, recorder):
        if self.counter is not None:
            self.counter.__exit__()
            self.walks = (*self.walks, self.counter.walk)
            if self.rank == 0:
                Path(os.environ["WALK_FILE"]).write_text(json.dumps(min(self.walks)))
            self.counter = None
        self.n_steps += 1
        if self.n_steps in range(WARM, WARM + 3):
            self.counter = Counter().__enter__()
        super().train_iter(count, recorder)
