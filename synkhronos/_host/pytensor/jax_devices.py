"""The devices of JAX. A rank starts JAX after the fork, for its own device, and for no other.

A process that has started JAX has its threads, and perhaps a GPU: no process that is forked from
it can use JAX.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import sys

from synkhronos._host import pythons
from synkhronos.errors import SessionError

_NAME = re.compile(r"(?:jax:)?([a-z]+)(\d*)")


def require_package() -> None:
    """Raise ImportError unless JAX is installed."""
    if importlib.util.find_spec("jax") is None:
        raise ImportError(
            "With PyTensor, ranks on GPUs compute with JAX, which is not installed here: "
            f"{pythons.install('jax-cuda')}, or for JAX on CPU cores {pythons.install('jax')}."
        )


def refuse_started(where: str) -> None:
    """Raise if JAX has started in this process: `where` names the call that comes too late."""
    if has_started():
        raise SessionError(
            f"{where} must come before JAX computes anything in this process: a process that is "
            "forked afterwards can't use JAX. Start Python again (in a notebook: restart the "
            f"kernel), and call {where} first."
        )


def has_started() -> bool:
    """Return whether JAX has started in this process, with threads and perhaps a GPU."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


@contextlib.contextmanager
def _failures_of_plugins():
    """Yield a list of what plugins of JAX raise in the block: JAX only writes it to its log."""
    failures: list[str] = []

    def note(record):
        problem = record.exc_info[1] if record.exc_info else record.getMessage()
        failures.append((str(problem) or type(problem).__name__).partition("\n")[0])

    handler = logging.Handler(logging.ERROR)
    handler.emit = note
    logger = logging.getLogger("jax._src.xla_bridge")
    logger.addHandler(handler)
    try:
        yield failures
    finally:
        logger.removeHandler(handler)


def start(name: str, threads: int):
    """Start JAX in this process for one device; return this device, which is JAX's default one.

    Names are those of `synkhronos.fork`: "cuda1", or "jax:rocm0" for any platform of JAX. Floats
    and integers keep their 64 bits. GPU memory is taken as it is needed, as ranks may share a GPU.

    Raises RuntimeError if JAX lacks the device.
    """
    platform, number = _NAME.fullmatch(name).groups()
    number = number or "0"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if threads == 1:  # XLA's own pool has a thread for each core
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # callbacks could wait for ever
    jax.config.update("jax_default_matmul_precision", "highest")  # else TF32 on GPUs
    visible = f"jax_{platform}_visible_devices"
    if hasattr(jax.config, visible):  # else JAX opens all GPUs
        jax.config.update(visible, number)
        number = "0"
    # Callbacks from JAX's code to Python go through its CPU device.
    jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
    try:
        with _failures_of_plugins() as failures:
            device = jax.devices(platform)[int(number)]
    except (RuntimeError, IndexError, AssertionError) as error:
        reason = "it has no device of that number"
        if not isinstance(error, IndexError):
            lines = str(error).strip().splitlines() or [f"it has no plugin for {platform}"]
            reason = "; ".join([lines[0].rstrip("."), *failures])
        used = " (has this process, from which the rank was forked, used CUDA before?)"
        advice = used if platform == "cuda" and failures else ""
        raise RuntimeError(f"JAX can't open the device {name}: {reason}{advice}.") from error
    jax.config.update("jax_default_device", device)
    # PyTensor says what JAX is to do when it is first asked to compile: it would undo this.
    import pytensor.link.jax.dispatch  # noqa: F401

    jax.config.update("jax_enable_x64", True)
    return device
