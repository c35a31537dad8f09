"""Jupyter kernels for tests, in a process of their own: Jupyter's sockets and threads stay there.

python kernels.py execute NOTEBOOK RESULT    run all cells, and write the notebook with its outputs
python kernels.py interrupt                  interrupt calls, and print the kernel's outputs
python kernels.py restart HOW                restart a kernel that is "asked to end" or "killed"
"""

import json
import sys
import time

import nbclient
import nbformat
import psutil
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client import AsyncKernelManager, KernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager


class ThisPython(KernelSpecManager):
    """Makes kernels of this interpreter, not those that are installed in HOME."""

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(**get_kernel_dict())


def execute(path, result):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    manager = AsyncKernelManager(kernel_spec_manager=ThisPython())
    nbclient.NotebookClient(notebook, km=manager, timeout=300).execute(cwd=".")
    nbformat.write(notebook, result)


SET_UP = """
import theano.tensor as T
import synkhronos as synk

synk.fork(2)
x = T.dvector("x")
f = synk.function([x], x.mean(), mode="FAST_COMPILE")
g = synk.function([x], (x, "gather"), mode="FAST_COMPILE")
synk.distribute()
"""
CALL_FOR_EVER = """
print("begun", flush=True)
while True:
    f([1.0, 2.0, 6.0])
"""
NEW_FUNCTION = 'synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")([1, 2, 3])'


class Kernel:
    """A running kernel."""

    def __init__(self):
        self.manager = KernelManager(kernel_spec_manager=ThisPython())
        self.manager.start_kernel()
        self._client = self.manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def run(self, code, interrupted=False):
        """Run code; return the name of its error, if any, and its outputs."""
        texts = []

        def hook(message):
            content = message["content"]
            text = content.get("text") or content.get("data", {}).get("text/plain")
            if text and interrupted and not texts:
                time.sleep(0.2)
                self.manager.interrupt_kernel()
            texts.extend([text] if text else [])

        reply = self._client.execute_interactive(code, output_hook=hook, timeout=60)["content"]
        return reply.get("ename"), texts

    def workers(self):
        return psutil.Process(self.manager.provisioner.pid).children()

    def restart(self, now):
        self.manager.restart_kernel(now=now)
        self._client.wait_for_ready(timeout=60)

    def kill(self):
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def interrupt():
    """Interrupt calls three times; then kill the kernel."""
    kernel = Kernel()
    said = [kernel.run(SET_UP)]
    workers = kernel.workers()
    for _ in range(3):
        said += [kernel.run(CALL_FOR_EVER, interrupted=True)]
        said += [kernel.run("g([1, 2, 3])"), kernel.run(NEW_FUNCTION)]
    same = kernel.workers() == workers
    kernel.kill()
    alive = still_alive(workers)
    print(json.dumps({"said": said, "workers": len(workers), "same": same, "alive": alive}))


def restart(how):
    """Restart a kernel in the middle of a session; then kill it in the middle of the next."""
    kernel = Kernel()
    said, workers, alive = [], [], []
    for number in range(2):
        said += [kernel.run(SET_UP.replace("fork(2)", "fork(3)")), kernel.run(NEW_FUNCTION)]
        workers.append(kernel.workers())
        if number == 0:
            kernel.restart(now=how == "killed")
        else:
            kernel.kill()
        alive.append(still_alive(workers[-1]))
    pids = [[worker.pid for worker in each] for each in workers]
    print(json.dumps({"said": said, "workers": pids, "alive": alive}))


def still_alive(processes):
    """Wait up to 10 seconds for processes to end; return the number of those that have not."""
    deadline = time.monotonic() + 10
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return sum(map(is_alive, processes))


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    {"execute": execute, "interrupt": interrupt, "restart": restart}[sys.argv[1]](*sys.argv[2:])
