"""Train an LSTM on sentences by BSP, with parameters that are averaged after each minibatch.

Each of scikit-learn's digits is a sentence of 16 words here: one for each row and each column of
its pixels. With SYNKHRONOS_DATA=FOLDER the sentences are IMDB's reviews.
"""

import sys
from pathlib import Path

from synkhronos.rules import BSP

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demos import _rules
from demos._arguments import positive

PROGRAM = Path(__file__).stem


def parse(argv):
    """Read the command line."""
    description = "Train an LSTM on sentences that are made of handwritten digits."
    parser = _rules.parser_for(PROGRAM, description, epochs=15, batch=16)
    parser.add_argument("--units", type=positive, default=64, metavar="N", help="of the LSTM (64)")
    parser.add_argument(
        "--words", type=positive, default=514, metavar="N", help="that are known (514)"
    )
    return parser.parse_args(argv)


def main(argv=None):
    """Run the demo; return the errors of validation of all epochs."""
    arguments = parse(argv)
    # The LSTM updates its parameters itself, by adadelta, so there are no velocities to exchange.
    rule = BSP(sync_type="avg")
    settings = {"units": arguments.units, "n_words": arguments.words}
    return _rules.run(rule, arguments, "theanompi.models.lstm", "LSTM", settings)


if __name__ == "__main__":
    main()
