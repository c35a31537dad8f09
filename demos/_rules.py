"""Parts of the demos of Theano-MPI's rules: arguments, the run, the report."""

import argparse
import os
import tempfile
from pathlib import Path

from demos._arguments import names, positive
from demos._tables import table
from synkhronos import rules
from synkhronos.rules.recorder import Recorder


def parser_for(program, description, epochs, batch):
    """Return a parser of the arguments that these demos share."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    add = parser.add_argument
    add("--devices", type=names, default=["cpu", "cpu"], metavar="A,B",
        help="one for each rank (cpu,cpu)")  # fmt: skip
    add("--epochs", type=positive, default=epochs, metavar="N", help=f"({epochs})")
    add("--batch", type=positive, default=batch, metavar="N",
        help=f"rows in a minibatch of each rank ({batch})")  # fmt: skip
    add("--output", type=Path, metavar="FOLDER",
        help="of snapshots, logs and the recorder's file (a temporary one)")  # fmt: skip
    return parser


def run(rule, arguments, modelfile, modelclass, settings):
    """Train a model of the package; return the errors of validation of all epochs."""
    os.environ.setdefault("SYNKHRONOS_DATA", "digits")
    kept = None
    if arguments.output is None:
        kept = tempfile.TemporaryDirectory(prefix="synkhronos-demo-")
    output = Path(kept.name if kept else arguments.output)
    rule.init(
        devices=arguments.devices,
        modelfile=modelfile,
        modelclass=modelclass,
        settings={"n_epochs": arguments.epochs, "batch_size": arguments.batch, **settings},
        snapshot_path=str(output / "snapshots"),
        inforec_path=str(output / "inforec"),
        log_path=str(output / "logs"),
    )
    try:
        rule.wait(check=True)
        recorder = Recorder(verbose=False)
        recorder.load(output / "inforec" / "inforec.pkl")
    except rules.RuleFailed as error:
        raise SystemExit(str(error)) from None
    finally:
        if kept:
            kept.cleanup()
    rows = [
        [epoch, int(count), f"{cost:.4f}", f"{100 * error:.1f} %"]
        for epoch, (count, cost, error, _) in enumerate(recorder.val_info)
    ]
    print("\n" + table(["epoch", "minibatches", "validation cost", "error"], rows))
    return [error for _, _, error, _ in recorder.val_info]
