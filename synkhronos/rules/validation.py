"""Validation: the loop over the batches of validation, which all rules share."""

from __future__ import annotations

import numbers

from synkhronos.rules.run import Run


def validate(run: Run, count: int, shares: bool = False) -> bool:
    """Validate the model; return whether it asks to stop the training.

    Parameters
    ----------
    run : Run
    count : int
        Batches that all ranks have trained with.
    shares : bool, optional
        Whether each rank validates a part of the data; else this one validates all.

    Notes
    -----
    ``val_iter`` returns None to go on with the next sub-batch, a number to go on with that batch,
    or ``'stop'``.
    """
    model, recorder = run.model, run.recorder
    stop, batch = False, 0
    while batch < int(model.data.n_batch_val):
        following = batch + 1
        for _ in range(int(model.n_subb)):
            returned = model.val_iter(count, recorder)
            if isinstance(returned, str) and returned == "stop":
                stop = True
            elif isinstance(returned, numbers.Real) and not isinstance(returned, bool):
                following = int(returned)
                break
        batch = following
    model.reset_iter("val")
    if shares:
        recorder.gather_val_info()
    recorder.print_val_info(count)
    model.current_info = recorder.get_latest_val_info()
    return stop
