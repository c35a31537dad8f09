"""Jupyter kernels for tests, in a process of their own: Jupyter's sockets and threads stay there.

python kernels.py execute NOTEBOOK RESULT    run all cells, and write the notebook with its outputs
python kernels.py interrupt                  interrupt calls, and print what the kernel said
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
    """Makes kernels of this interpreter, whatever kernels are installed in HOME."""

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


def interrupt():
    """Interrupt calls three times; then kill the kernel."""
    manager = KernelManager(kernel_spec_manager=ThisPython())
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)

    def run(code, interrupted=False):
        """Run code; return the name of its error, if any, and what it showed."""
        texts = []

        def hook(message):
            content = message["content"]
            text = content.get("text") or content.get("data", {}).get("text/plain")
            if text and interrupted and not texts:
                time.sleep(0.2)
                manager.interrupt_kernel()
            texts.extend([text] if text else [])

        reply = client.execute_interactive(code, output_hook=hook, timeout=60)["content"]
        return reply.get("ename"), texts

    said = [run(SET_UP)]
    process = psutil.Process(manager.provisioner.pid)
    workers = process.children()
    for _ in range(3):
        said += [run(CALL_FOR_EVER, interrupted=True), run("g([1, 2, 3])"), run(NEW_FUNCTION)]
    same = process.children() == workers
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    deadline = time.monotonic() + 10
    while any(is_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    alive = sum(is_alive(worker) for worker in workers)
    print(json.dumps({"said": said, "workers": len(workers), "same": same, "alive": alive}))


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    {"execute": execute, "interrupt": interrupt}[sys.argv[1]](*sys.argv[2:])
