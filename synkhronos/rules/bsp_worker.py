"""``theanompi.worker``: one rank of BSP, for scripts that drive it themselves.

    worker = BSP_Worker("cpu", "cdd", "ar")    the only rank, or one that a launcher has started
    worker.build(model, config)                checks, compiles
    worker.BSP_run(model)                      trains all epochs

Scripts that leave this to a launcher call `synkhronos.rules.BSP`.
"""

from __future__ import annotations

from typing import Any, Mapping

from synkhronos.rules import bsp, contract, options
from synkhronos.rules.arithmetic import warmed_up
from synkhronos.rules.compatible.lib.base import MPI_GPU_Process
from synkhronos.rules.first_batch import FirstBatch
from synkhronos.rules.job import Interrupt, Job
from synkhronos.rules.recorder import Recorder
from synkhronos.rules.request import check_options_together
from synkhronos.rules.run import Run

WARM_UP_EPOCHS = options.TABLE["warm_up_epochs"].default


class BSP_Worker(MPI_GPU_Process):
    """One rank of BSP; `synkhronos.rules.BSP` starts all of them.

    Parameters
    ----------
    device : str
    sync_type, exch_strategy : str
        As for `synkhronos.rules.BSP`.
    """

    def __init__(self, device: str, sync_type: str, exch_strategy: str):
        super().__init__(device)
        self.get_intranode_comm()
        self.sync_type, self.exch_strategy = sync_type, exch_strategy
        self.verbose = self.rank == 0
        self.warmup_epochs, self.stop = WARM_UP_EPOCHS, False
        self.recorder: Any = None
        self._look = FirstBatch()

    def build(self, model: Any, config: Mapping[str, Any]) -> None:
        """Check and compile a model; `config` is what its constructor got, with ``mname``."""
        contract.check(model)
        self._look.check(model)
        contract.compile_functions(model, self.sync_type)
        name = config.get("mname", type(model).__name__)
        comm = self.comm if self.size > 1 else None
        self.recorder = Recorder(comm, printFreq=40, modelname=name, verbose=self.verbose)

    def lr_warmup(self, model: Any, epoch: int) -> None:
        """Multiply the learning rate at the beginning of one of the first epochs."""
        now, before = (warmed_up(at, self.size, self.warmup_epochs) for at in (epoch, epoch - 1))
        factor = now / before
        if factor != 1:
            contract.ScaledRate(model).set_factor(factor)

    def BSP_run(self, model: Any) -> None:
        """Train all epochs of the model, by BSP."""
        chosen = options.check("BSP", sync_type=self.sync_type, exch_strategy=self.exch_strategy)
        check_options_together(chosen, self.size)
        job = Job("BSP", "", type(model).__name__, [self.device] * self.size, options=chosen)
        run = Run(job, self.group, model, self.recorder, Interrupt())
        strategy, _ = bsp.strategy_for(self.exch_strategy, job.devices, self.group.hosts)
        exchange = bsp.EXCHANGES[self.sync_type]
        bsp.SynchronousWorker(run, exchange, strategy, 1, WARM_UP_EPOCHS).train()
        model.cleanup()
