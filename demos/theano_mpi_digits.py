"""Train a convolutional network on handwritten digits by one of Theano-MPI's rules.

A session script as in Theano-MPI's README, with one import changed. Each rank is a process
with one device, and imports theanompi.models.cifar10 itself. The digits are scikit-learn's,
as colour images of CIFAR-10's shape; with SYNKHRONOS_DATA=FOLDER it is CIFAR-10 itself.

theano_mpi_digits.cfg is the same run as a configuration file.
"""

import sys
from pathlib import Path

from synkhronos.rules import ASGD, BSP, EASGD, GOSGD

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demos import _rules
from demos._arguments import above_zero, positive

PROGRAM = Path(__file__).stem
RULES = {"BSP": BSP, "EASGD": EASGD, "GOSGD": GOSGD, "ASGD": ASGD}
FILTERS, UNITS = [16, 32, 16], 64


def parse(argv):
    """Read the command line."""
    description = "Train on handwritten digits by one of Theano-MPI's rules."
    parser = _rules.parser_for(PROGRAM, description, epochs=8, batch=16)
    add = parser.add_argument
    add("--rule", choices=list(RULES), default="BSP", help="(BSP)")
    add("--filters", type=positive, nargs=3, default=FILTERS, metavar="N", help="(16 32 16)")
    add("--units", type=positive, default=UNITS, metavar="N", help="of the dense layer (64)")
    add("--rate", type=above_zero, default=0.01, metavar="R", help="learning rate (0.01)")
    return parser.parse_args(argv)


def main(argv=None):
    """Run the demo; return the errors of validation of all epochs."""
    arguments = parse(argv)
    rule = RULES[arguments.rule]()
    settings = {
        "filters": arguments.filters,
        "units": arguments.units,
        "learning_rate": arguments.rate,
    }
    return _rules.run(rule, arguments, "theanompi.models.cifar10", "Cifar10_model", settings)


if __name__ == "__main__":
    main()
